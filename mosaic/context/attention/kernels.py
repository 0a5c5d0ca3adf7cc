"""Kernels of local attention: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mosaic.context.attention.block_rows import BlockRows
from mosaic.context.attention.exchange import Exchange
from mosaic.context.attention.flex import FlexKernel
from mosaic.context.plan import ContextPlan
from mosaic.errors import unknown


class Kernel(Protocol):
    """Attention of a rank's queries over fetched blocks, for one group of heads."""

    def forward(self, q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, Any]:
        """Returns the output, and state for the backward pass."""

    def backward(
        self, saved: Any, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, gradient: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of queries and of fetched blocks."""


KERNELS: dict[str, Callable[..., Kernel]] = {"block_rows": BlockRows, "flex": FlexKernel}
"""By name: plain torch row by row, on any device; and compiled FlexAttention, on CUDA."""

FLEX_BLOCK = 128
"""Tile of compiled FlexAttention, in tokens of queries and of keys."""


def make_kernel(name: str | None, plan: ContextPlan, rank: int, exchange: Exchange, device: torch.device) -> Kernel:
    """Returns a kernel by name; None: compiled FlexAttention on CUDA, block rows elsewhere.

    Raises:
        ValueError: The name is unknown, or blocks are not a multiple of its tile.
    """
    kernel = name or ("flex" if device.type == "cuda" else "block_rows")
    if kernel not in KERNELS:
        raise ValueError(unknown("kernel", kernel, KERNELS))
    if kernel == "flex" and plan.blocks.block % FLEX_BLOCK:
        raise ValueError(
            f"block={plan.blocks.block} is not a multiple of the {FLEX_BLOCK} tokens that compiled FlexAttention works "
            f"on; plan with block={FLEX_BLOCK}, or {2 * FLEX_BLOCK} for FlashAttention on Blackwell"
        )
    return KERNELS[kernel](plan, rank, exchange.column_of, exchange.num_blocks, device)
