"""A module with the inputs that it got in the model: what a measurement runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


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

    def forward(self) -> list[torch.Tensor]:
        """Calls the module on fresh aliases of its inputs; returns the tensors that take a gradient."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), (self.args, self.kwargs)
        )
        if self.settings is None:
            result = self.module(*args, **kwargs)
        else:
            with self.settings():
                result = self.module(*args, **kwargs)
        leaves = pytree.tree_leaves(_fields(result))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    def backward(self, outputs: list[torch.Tensor], *, keep: bool = False) -> None:
        """Runs backward from ``outputs`` with gradients of one; parameters' gradients are dropped afterwards."""
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs], retain_graph=keep)
        for parameter in self.module.parameters():
            parameter.grad = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers, and gradients of what trains."""
        weights = sum(p.nbytes * (2 if p.requires_grad else 1) for p in self.module.parameters())
        return weights + sum(buffer.nbytes for buffer in self.module.buffers())

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


def _fields(result: Any) -> Any:
    """Sees through a plain dataclass, which pytrees do not."""
    is_instance = hasattr(result, "__dataclass_fields__") and not isinstance(result, type)
    return vars(result) if is_instance and hasattr(result, "__dict__") else result
