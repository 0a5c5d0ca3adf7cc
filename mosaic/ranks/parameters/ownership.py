"""Parameters only where they are used: on other ranks ``Elsewhere`` stands for them, which has no memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mosaic.errors import ModuleContractError
from mosaic.parts.weights import swap, swappable
from mosaic.ranks.parameters.elsewhere import Elsewhere, Home


def give_up(module: nn.Module, home: Home, *, keep: Collection[int] = ()) -> int:
    """Frees a module's parameters and buffers on a rank that does not run it; returns the bytes that were freed.

    The parameters stay the same objects, so an optimizer that has them keeps them; without gradients it skips them.

    Args:
        module: The module.
        home: Where it is not given up; whoever calls a part of it here, or a copy, is told.
        keep: Ids of tensors that this rank needs nevertheless.
    """
    freed = 0
    with swappable(module):
        for part in module.modules():
            before = freed
            for parameter in part._parameters.values():
                if parameter is not None and not parameter.is_meta and id(parameter) not in keep:
                    freed += parameter.nbytes
                    torch.utils.swap_tensors(parameter, Elsewhere.of(parameter, home, is_parameter=True))
            for name, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_meta and id(buffer) not in keep:
                    freed += buffer.nbytes
                    part._buffers[name] = Elsewhere.of(buffer, home)
            if freed > before:
                part.register_forward_pre_hook(GivenUp(home))
    return freed


def take_back(model: nn.Module, whole: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Gives every part of a model what it was without; the parameters stay the same objects.

    Args:
        model: The model.
        whole: Returns a tensor's values, from its name and what is here; called for all tensors, in one order, once
            for each.
    """
    with swappable(model):
        for path, tensor in tensors_of(model):
            values = whole(path, tensor)
            if not tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                swap(tensor, values)
            else:
                prefix, _, name = path.rpartition(".")
                model.get_submodule(prefix)._buffers[name] = values
    for part in model.modules():
        for key in [key for key, hook in part._forward_pre_hooks.items() if isinstance(hook, GivenUp)]:
            del part._forward_pre_hooks[key]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Refuses calls of what has no parameters here: a part that the loop calls itself, or a copy of the model."""

    home: Home
    """Where they are."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raises ModuleContractError, always."""
        raise ModuleContractError(
            f"the parameters of {self.home.name!r} are on {self.home} only, so that it cannot run here: neither a part "
            "of it alone, nor a copy of the model, nor the model within handle.disabled(). A copy that runs, on every "
            "rank, comes of handle.full_state_dict(), and of copying after handle.remove()"
        )


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a model's parameters, each once, and all buffers, by name; in one order on all ranks."""
    done: set[int] = set()
    for prefix, part in model.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or id(tensor) in done:
                continue
            if isinstance(tensor, nn.Parameter):  # on all ranks the same objects where it is the same one on any
                done.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, tensor
