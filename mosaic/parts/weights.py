"""Weights that a rank does not need: moved to the meta device, and stood in for while a chunk runs."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.errors import UnsplittableError


def device_of(model: nn.Module, tensors: Mapping[str, Any]) -> torch.device:
    """Returns where a model is; a model on the meta device is where its tensors are."""
    given = (value for value in pytree.tree_leaves(dict(tensors)) if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in (*model.parameters(), *given) if not tensor.is_meta), torch.device("cpu"))


def drop_weights(model: nn.Module, *, keep: Collection[str], whole: Iterable[nn.Module]) -> None:
    """Moves parameters to the meta device, so that their memory is free; the objects stay, for optimizers and ties.

    Args:
        model: The user's model.
        keep: First names of the parameters that stay.
        whole: Modules that do not run here: their buffers go too, but for single numbers.
    """
    with swappable(model):
        for name, parameter in model.named_parameters():
            if name not in keep and not parameter.is_meta:
                parameter.grad = None
                swap(parameter, torch.empty_like(parameter, device="meta"))
    for module in whole:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.ndim:  # numbers, such as strides, say what modules return
                    inner._buffers[name] = buffer.to("meta")


def give_memory(model: nn.Module, *, names: Collection[str], device: torch.device) -> frozenset[str]:
    """Gives parameters on the meta device memory, filled with zeros; returns which.

    Args:
        model: The user's model.
        names: First names of the parameters that are needed.
        device: Where to.
    """
    found = {name: one for name, one in model.named_parameters() if name in names and one.is_meta}
    with swappable(model):
        for parameter in found.values():
            swap(parameter, torch.zeros_like(parameter, device=device))
    return frozenset(found)


def load_weights(model: nn.Module, state: Mapping[str, Any], *, names: Collection[str], device: torch.device) -> None:
    """Loads parameters from a plain model's state; those on the meta device get memory. Buffers are copied.

    Args:
        model: The user's model.
        state: As the plain model's ``state_dict`` gives it; may hold more.
        names: First names of the parameters to load.
        device: Where to.

    Raises:
        KeyError: One of them is missing.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    with swappable(model):
        for first, parameter in model.named_parameters():
            if first not in names:
                continue
            found = next((name for name in aliases[id(parameter)] if name in state), None)
            if found is None:
                raise KeyError(f"{first} is not in the state, which has {len(state)} tensors; give the plain model's")
            if parameter.is_meta:
                swap(parameter, state[found].detach().to(device=device, dtype=parameter.dtype, copy=True))
            else:
                parameter.data.copy_(state[found])
    for name, buffer in model.named_buffers():
        if name in state and not buffer.is_meta:
            buffer.copy_(state[name])


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """A block in which a model's parameters may be swapped, which torch refuses while recurrent cells refer to them."""
    cells = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for cell in cells:
        cell._flat_weight_refs = []
    try:
        yield
    finally:
        for cell in cells:
            cell._flat_weight_refs = [None if one is None else weakref.ref(one) for one in cell._flat_weights]


def swap(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Puts other memory into a parameter, which stays the same object."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))


def meta_buffer(name: str) -> UnsplittableError:
    """Returns the error that a buffer has no values where it is read."""
    return UnsplittableError(
        f"buffer {name} is on the meta device, and this rank reads it; build the model so that buffers are real, as "
        "accelerate's init_empty_weights(include_buffers=False) does"
    )


class StandIns:
    """Zeros without memory in the place of parameters that operations between modules may look at.

    Args:
        model: The user's model, its foreign weights on the meta device.
        inside: Modules that hold parameters which nobody else looks at.
        device: Of the model before.
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
        """Puts them into their places for a while."""
        try:
            for owner, name, _, zero in self._places:
                owner[name] = zero
            yield
        finally:
            for owner, name, parameter, _ in self._places:
                owner[name] = parameter
