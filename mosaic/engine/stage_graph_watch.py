"""Seeing, operator by operator, whether a call can be captured: before the capture, where an error costs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.engine.stage_graph_module import storages

_READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CONSTANTS = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")


class CaptureWatch(TorchDispatchMode):
    """Notes why the operators of a call cannot be replayed.

    Attributes:
        obstacle: The first reason, or None.
    """

    def __init__(self, device: torch.device, inputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> None:
        """Watches a call.

        Args:
            device: Where its tensors should be.
            inputs: Tensors that it is called with; not to be written to.
            own: Parameters, buffers and other tensors of its module.
        """
        super().__init__()
        self.obstacle: str | None = None
        self._device = device
        self._inputs = storages(inputs)
        self._known = self._inputs | storages(own)
        self._hooks = _saved_tensor_hooks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged."""
        kwargs = kwargs or {}
        reason = self._reason(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._known |= storages([tensor])
            if tensor.device.type != self._device.type and reason is None:
                reason = self._strange_device(func, args, kwargs, tensor)
        if self.obstacle is None:
            self.obstacle = reason
        return result

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if any(tag in func.tags for tag in _READS_BACK):
            return f"it needs a value back from the device in the middle ({func})"
        if _saved_tensor_hooks() != self._hooks:
            return "it uses activation checkpointing or other hooks on saved tensors"
        if kwargs.get("generator") is not None:
            return "it draws random numbers from a generator of its own"
        if self._inputs & storages(_written(func, args, kwargs)):
            return f"it writes into one of its inputs ({func})"
        if func.name().split(".")[0] in _CONSTANTS:
            return None
        for tensor in _tensors((args, kwargs)):
            if tensor.device.type == self._device.type and not (storages([tensor]) & self._known):
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                return f"it reads a {shape} tensor that is neither an argument nor its module's own ({func})"
        return None

    def _strange_device(self, func: Any, args: Any, kwargs: Any, made: torch.Tensor) -> str | None:
        if any(tensor.device.type == self._device.type for tensor in _tensors((args, kwargs))):
            return f"it copies a tensor to {made.device} in the middle ({func})"
        return None


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _saved_tensor_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
