"""The number format in which a workload is counted: part of the workload, as its batch is.

Mixed precision is counted as torch's autocast runs it: matrix products, convolutions and attention in 16 bits, norms,
softmax and losses in float32. Weights, their gradients and AdamW's two moments stay in float32, 16 bytes for each
parameter, and so do sums of gradients over devices; casts of weights are kernels of their own and live until backward
has used them. A model that was made in bfloat16 (``model.bfloat16()``) trains in it, with 8 bytes for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
"""Names of the table, for the command line. The first is mixed precision."""

PRECISIONS: Mapping[Dtype, str] = MappingProxyType(
    {
        "bfloat16": "matrix products and attention in bfloat16 (autocast); "
        "weights, gradients and AdamW's state in float32",
        "float32": "all in float32, without TF32 but in convolutions",
    }
)
"""Descriptions by name."""


def usual_dtype(kind: Literal["cuda", "host"]) -> Dtype:
    """Returns the number format in which a model is usually trained on a kind of device."""
    return "bfloat16" if kind == "cuda" else "float32"
