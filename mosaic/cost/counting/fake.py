"""Copies of modules and batches whose tensors have a shape and a dtype, and no data."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


class FakeCopies(TorchFunctionMode):
    """Makes deep copies without data, in which tensors that were shared stay shared.

    Args:
        mode: Owner of the copies, which are fake tensors on the CPU; None for tensors on the meta device.
        rows: First dimension of the tensors that get another one.
        batch: The other one; None keeps all shapes.

    Attributes:
        sizes: How often each size was the first dimension of a tensor.
    """

    def __init__(self, mode: FakeTensorMode | None, rows: int = 0, batch: int | None = None) -> None:
        super().__init__()
        self._mode: AbstractContextManager[Any] = nullcontext() if mode is None else mode
        self._device = "meta" if mode is None else "cpu"
        self._rows, self._batch = rows, batch
        self.sizes: Counter[int] = Counter()

    def of(self, value: Any) -> Any:
        """Copies a module, or nested arguments, which are not touched."""
        memo: dict[int, Any] = {}
        if isinstance(value, nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                memo[id(tensor)] = self._fake(tensor)
        with self:  # under which ``copy.deepcopy`` of a tensor returns a fake one
            return copy.deepcopy(value, memo)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        if shape:
            self.sizes[shape[0]] += 1
            if self._batch is not None and shape[0] == self._rows:
                shape = (self._batch, *shape[1:])
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
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
