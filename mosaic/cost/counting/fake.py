"""Copies of modules and batches whose tensors have a shape and a dtype, and no data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

Resize = Callable[[torch.Size], tuple[int, ...]]
"""Maps a tensor's shape to that of its copy."""


def fake_copy(value: Any, mode: FakeTensorMode | None, resize: Resize | None = None) -> Any:
    """Returns a deep copy without data, in which tensors that were shared stay shared.

    Args:
        value: A module, or nested arguments; not touched.
        mode: Owner of the copies, which are fake tensors on the CPU; None for tensors on the meta device.
        resize: New shapes from the old ones; by default the same.
    """
    memo: dict[int, Any] = {}
    copying = _Copying(mode, resize)
    if isinstance(value, nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            memo[id(tensor)] = copying.fake(tensor)
    with copying:
        return copy.deepcopy(value, memo)


def leading_sizes(value: Any) -> Counter[int]:
    """Returns how often each size is the first dimension of a tensor in nested arguments."""
    sizes: Counter[int] = Counter()

    def note(shape: torch.Size) -> tuple[int, ...]:
        if len(shape) > 0:
            sizes[shape[0]] += 1
        return tuple(shape)

    fake_copy(value, None, note)
    return sizes


class _Copying(TorchFunctionMode):
    """Makes ``copy.deepcopy`` of a tensor return a fake one."""

    def __init__(self, mode: FakeTensorMode | None, resize: Resize | None) -> None:
        super().__init__()
        self._mode: AbstractContextManager[Any] = nullcontext() if mode is None else mode
        self._device = "meta" if mode is None else "cpu"
        self._resize = resize

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor's fake copy, a parameter for a parameter."""
        shape = tuple(tensor.shape) if self._resize is None else self._resize(tensor.shape)
        with torch._C.DisableTorchFunction(), self._mode:
            if tensor.layout is not torch.strided:
                empty = torch.empty(shape, dtype=tensor.dtype, device=self._device)
            else:
                empty = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(empty, requires_grad=tensor.requires_grad)
            return empty.requires_grad_(tensor.requires_grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers for copies; leaves everything else alone."""
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
