"""Weights of other ranks: on the meta device, with stand-ins while a chunk runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.errors import UnsplittableError


def device_of(model: nn.Module, tensors: Mapping[str, Any]) -> torch.device:
    """Returns the device of a model, or of the tensors if the model is on the meta device."""
    sample_tensors = (value for value in pytree.tree_leaves(dict(tensors)) if isinstance(value, torch.Tensor))
    all_tensors = (*model.parameters(), *sample_tensors)
    return next((tensor.device for tensor in all_tensors if not tensor.is_meta), torch.device("cpu"))


def drop_weights(model: nn.Module, *, keep: Collection[str], whole: Iterable[nn.Module]) -> None:
    """Moves parameters to the meta device to free their memory; the objects stay, for optimizers and ties.

    Parameters with the first names ``keep`` stay. Of the modules ``whole``, which do not run here, buffers move too.
    """
    with swappable(model):
        for name, parameter in model.named_parameters():
            if name not in keep and not parameter.is_meta:
                parameter.grad = None
                swap(parameter, torch.empty_like(parameter, device="meta"))
    for module in whole:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.ndim:  # scalars, such as strides, affect the shapes of results
                    inner._buffers[name] = buffer.to("meta")


def give_memory(model: nn.Module, *, names: Collection[str], device: torch.device) -> frozenset[str]:
    """Allocates parameters that are on the meta device, as zeros; returns their names."""
    parameters = {name: each for name, each in model.named_parameters() if name in names and each.is_meta}
    with swappable(model):
        for parameter in parameters.values():
            swap(parameter, torch.zeros_like(parameter, device=device))
    return frozenset(parameters)


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """Allows to swap a model's parameters, which torch refuses while recurrent cells refer to them."""
    cells = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for cell in cells:
        cell._flat_weight_refs.clear()  # the list itself may be noted elsewhere
    try:
        yield
    finally:
        for cell in cells:
            cell._flat_weight_refs += [None if weight is None else weakref.ref(weight) for weight in cell._flat_weights]


def swap(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the memory of a parameter, which stays the same object."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))


def meta_buffer(name: str) -> UnsplittableError:
    return UnsplittableError(
        f"buffer {name} is on the meta device, and this rank reads it; build the model so that buffers are real, as "
        "accelerate's init_empty_weights(include_buffers=False) does"
    )


class StandIns:
    """Zeros without memory, in place of parameters on the meta device that operations between modules may read.

    Only the modules ``inside`` read their own.
    """

    def __init__(self, model: nn.Module, *, inside: Iterable[nn.Module], device: torch.device) -> None:
        hidden = {id(module) for layer in inside for module in layer.modules()}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, torch.Tensor]] = []
        self.by_name: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            if id(module) in hidden:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    zero = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                    self._places.append((module._parameters, name, parameter, zero))
                    self.by_name[f"{path}.{name}" if path else name] = zero

    @contextmanager
    def placed(self) -> Iterator[None]:
        try:
            for owner, name, _, zero in self._places:
                owner[name] = zero
            yield
        finally:
            for owner, name, parameter, _ in self._places:
                owner[name] = parameter


class WeightsInUse:
    """A read-write lock: users share the weights; a thread that replaces them waits for all users.

    It is reentrant: a user may use the weights again inside, or replace them, and then does not wait for itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_users = 0
        self._num_replacing = 0  # including waiting ones
        self._own = _Depth()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock for computation with the weights."""
        with self._changed:
            while self._num_replacing and not self._own.depth:
                self._changed.wait()
            self._num_users += 1
        self._own.depth += 1
        try:
            yield
        finally:
            self._own.depth -= 1
            with self._changed:
                self._num_users -= 1
                if not self._num_users:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the lock to replace weights temporarily."""
        with self._changed:
            self._num_replacing += 1
            self._num_users -= self._own.depth
            self._changed.notify_all()
            while self._num_users:
                self._changed.wait()
            try:
                yield  # with the lock held: one thread at a time
            finally:
                self._num_users += self._own.depth
                self._num_replacing -= 1
                self._changed.notify_all()


class _Depth(threading.local):
    """Nesting depth of ``shared`` in the current thread."""

    depth = 0
