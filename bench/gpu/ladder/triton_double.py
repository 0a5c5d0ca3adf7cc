"""A kernel that Triton compiles; loaded by one rung alone, since not every machine has Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double(given, made, count, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(made + index, 2 * tl.load(given + index, mask=inside), mask=inside)


def double(given: torch.Tensor) -> torch.Tensor:
    """Returns twice a tensor, by a Triton kernel on the current stream."""
    made = torch.empty_like(given)
    _double[(triton.cdiv(given.numel(), 1024),)](given, made, given.numel(), BLOCK=1024)
    return made
