"""In which number format a workload is counted: part of the workload, as its batch is.

Mixed precision is counted as torch's autocast runs it: matrix products, convolutions and attention in 16 bits, norms,
softmax and losses in float32. Weights, their gradients and AdamW's two moments stay in float32, 16 bytes for each
parameter, and so do sums of gradients over devices; casts of weights are kernels of their own and live until backward
has used them. Training in pure bfloat16 is what a model gets that was made so (``model.bfloat16()``): 8 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
"""Names of the table, for the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A number format to count in."""

    name: Dtype
    """By which it is asked for."""
    description: str
    is_mixed: bool
    """True if only matrix products and the like have it, and weights are in float32."""


_PRECISIONS = (
    Precision(
        name="bfloat16",
        description="matrix products and attention in bfloat16 (autocast); "
        "weights, gradients and AdamW's state in float32",
        is_mixed=True,
    ),
    Precision(name="float32", description="all in float32, without TF32 but in convolutions", is_mixed=False),
)
PRECISIONS: Mapping[str, Precision] = MappingProxyType({precision.name: precision for precision in _PRECISIONS})
"""All of them by name."""


def usual_dtype(kind: Literal["cuda", "host"]) -> Dtype:
    """Returns the one in which a model is trained on a kind of device where nobody says another."""
    return "bfloat16" if kind == "cuda" else "float32"
