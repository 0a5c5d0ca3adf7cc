"""Local attention by compiled FlexAttention, on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import flex_attention

from mosaic.context.attention.block_mask import block_mask
from mosaic.context.plan import ContextPlan


class FlexKernel:
    """Attention of a rank's queries over fetched blocks.

    The backward pass fetches keys and values of a group of heads again: the graph of the forward pass keeps none.

    Args:
        plan: Plan of the sequence.
        rank: Rank of this process in its group.
        column_of: Place of each block among the fetched ones.
        num_columns: Fetched blocks.
        device: Device of the tensors.
        attention: The attention function; None: compiled FlexAttention.
    """

    def __init__(
        self,
        plan: ContextPlan,
        rank: int,
        column_of: npt.NDArray[np.int32],
        num_columns: int,
        device: torch.device,
        attention: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self._mask = block_mask(plan, rank, column_of, num_columns, device)
        self._attention = attention or _compiled()

    def forward(self, q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, Any]:
        """Returns the output and its graph."""
        tape = _Tape(functools.partial(self._attention, block_mask=self._mask, scale=scale, enable_gqa=True))
        return tape.run(q, *_halves(kv, q.shape[-1])), tape

    def backward(
        self, saved: Any, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, gradient: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of queries and of fetched blocks, these in 32 bits for the sum over ranks."""
        dq, dk, dv = saved.gradients(*_halves(kv, q.shape[-1]), gradient)
        both = torch.cat([dk, dv], -1).to(torch.promote_types(kv.dtype, torch.float32))
        return dq, both.unflatten(2, (kv.shape[0], -1)).permute(2, 0, 1, 3, 4).contiguous()


class _Tape:
    """An autograd graph without its keys and values, which the backward pass provides again."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        self._attention = attention
        self._leaves: tuple[torch.Tensor, ...] = ()
        self._out: torch.Tensor | None = None
        self._refetched: tuple[torch.Tensor, ...] = ()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the output; the tape owns ``k`` and ``v`` and empties them."""
        self._leaves = tuple(each.detach().requires_grad_() for each in (q, k, v))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            self._out = self._attention(*self._leaves)
        for each in self._leaves[1:]:
            each.untyped_storage().resize_(0)
        return self._out.detach()

    def gradients(self, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, keys and values."""
        assert self._out is not None
        self._refetched = (k, v)
        try:
            return torch.autograd.grad(self._out, self._leaves, gradient)
        finally:
            self._refetched = ()

    def _pack(self, tensor: torch.Tensor) -> Any:
        for index, leaf in enumerate(self._leaves[1:]):
            if tensor.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr():
                return index, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        index, shape, stride, offset = packed
        refetched: torch.Tensor = self._refetched[index].as_strided(shape, stride, offset)
        return refetched


def _halves(kv: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of keys and values, each (batch, heads, tokens, width)."""
    blocks, batch, heads, block, both = kv.shape
    halves = kv.new_empty(batch, heads, blocks * block, width), kv.new_empty(batch, heads, blocks * block, both - width)
    for half, part in zip(halves, (kv[..., :width], kv[..., width:]), strict=True):
        half.unflatten(2, (blocks, block)).copy_(part.permute(1, 2, 0, 3, 4))
    return halves


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention)
    return compiled
