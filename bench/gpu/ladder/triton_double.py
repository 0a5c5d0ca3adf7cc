"""A Triton kernel, imported by only one rung, because not every machine has Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double(source, result, count, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(result + index, 2 * tl.load(source + index, mask=inside), mask=inside)


def double(source: torch.Tensor) -> torch.Tensor:
    """Returns twice a tensor, by a Triton kernel on the current stream."""
    result = torch.empty_like(source)
    _double[(triton.cdiv(source.numel(), 1024),)](source, result, source.numel(), BLOCK=1024)
    return result
