"""The number format in which a workload is counted.

Mixed precision follows torch's autocast: matrix products, convolutions and attention in 16 bits; norms, softmax and
losses in float32. Weights, gradients and AdamW's two moments are float32 (16 bytes per parameter), as is gradient
reduction. Casts of weights are separate kernels, and the cast weights live until backward has used them. A bfloat16
model (``model.bfloat16()``) trains in bfloat16, with 8 bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
"""Names for the command line. The first is mixed precision."""

PRECISIONS: Mapping[Dtype, str] = MappingProxyType(
    {
        "bfloat16": "matrix products and attention in bfloat16 (autocast); "
        "weights, gradients and AdamW's state in float32",
        "float32": "all in float32, with TF32 only in convolutions",
    }
)
"""Descriptions by name."""


def usual_dtype(kind: Literal["cuda", "host"]) -> Dtype:
    """Returns the usual number format for training on a kind of device."""
    return "bfloat16" if kind == "cuda" else "float32"
