"""A module with the inputs that it got in the model: what a measurement runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.find.restore import Changes


@dataclass(frozen=True, slots=True)
class Subject:
    """One module and the arguments of one of its calls."""

    name: str
    """Name in the graph."""
    module: nn.Module
    """The user's module itself, in the mode in which it will train."""
    args: tuple[Any, ...]
    """Positional arguments; tensors of any shape on the backend's device."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    settings: Callable[[], Any] | None = None
    """Makes a context that gives the thread the caller's gradient mode and autocast; None for the defaults."""
    changes: Changes | None = None
    """The changes that a run of its whole model made; None where unknown."""
    batch: int | None = None
    """Samples of its batch, where that was tried out; None for the leading dimension that all tensors have."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of what trains."""
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad)

    @property
    def num_trained(self) -> int:
        """Parameters that take a gradient, counted as elements."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def forward(self) -> list[torch.Tensor]:
        """Calls the module on fresh aliases of its inputs; returns the tensors that take a gradient."""
        args, kwargs = map_tensors(_alias, (self.args, self.kwargs))
        try:
            with self.settings() if self.settings is not None else nullcontext():
                result = self.module(*args, **kwargs)
        finally:  # as at the end of a step: no other call, perhaps on another lane, may find weights that this one cast
            torch.clear_autocast_cache()
        return [tensor for tensor in tensors_in(result) if tensor.requires_grad]

    def backward(self, outputs: list[torch.Tensor], *, keep: bool = False) -> None:
        """Runs backward from ``outputs`` with gradients of one; parameters' gradients are dropped afterwards."""
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs], retain_graph=keep)
        for parameter in self.module.parameters():
            parameter.grad = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers, and gradients of what trains."""
        weights = sum(p.nbytes for p in self.module.parameters())
        return weights + self.gradient_bytes + sum(buffer.nbytes for buffer in self.module.buffers())

    def activation_bytes(self) -> int:
        """Runs a forward and returns the bytes that it keeps for backward, parameters not counted."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self.module.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.backward(self.forward())
        return sum(kept.values())


def _is_dataclass(value: Any) -> bool:
    """Whether a value is a plain dataclass, which pytrees do not see through."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value) not in pytree.SUPPORTED_NODES


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory that is cut from the graph that made it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns nested values with each tensor replaced by what ``function`` makes of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if _is_dataclass(value):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, map_tensors(function, getattr(value, field.name)))
        return made
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    return pytree.tree_map_only(torch.Tensor, function, value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested values."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
