"""Parameters only where they are used: on other ranks they are meta tensors, which have a shape and no memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mosaic.errors import ModuleContractError


def give_up(module: nn.Module, *, keep: Collection[int] = (), told: GivenUp | None = None) -> int:
    """Frees a module's parameters and buffers on a rank that does not run it; returns the bytes that were freed.

    The parameters stay the same objects, so an optimizer that has them keeps them; without gradients it skips them.

    Args:
        module: The module.
        keep: Ids of tensors that this rank needs nevertheless.
        told: What to tell who calls a part of it here, or a copy.
    """
    freed = 0
    for part in module.modules():
        before = freed
        for parameter in part._parameters.values():
            if parameter is not None and not parameter.is_meta and id(parameter) not in keep:
                freed += parameter.nbytes
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, empty)
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta and id(buffer) not in keep:
                freed += buffer.nbytes
                part._buffers[name] = torch.empty_like(buffer, device="meta")
        if told is not None and freed > before:
            part.register_forward_pre_hook(told)
    return freed


def take_back(model: nn.Module, whole: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Gives every part of a model what it was without; the parameters stay the same objects.

    Args:
        model: The model.
        whole: Returns a tensor's values, from its name and what is here; called for all tensors, in one order, once
            for each.
    """
    done: set[int] = set()
    for prefix, part in model.named_modules():
        for name, tensor in _own(part):
            if id(tensor) in done:
                continue
            if isinstance(tensor, nn.Parameter):  # on all ranks the same objects where it is the same one on any
                done.add(id(tensor))
            values = whole(f"{prefix}.{name}" if prefix else name, tensor)
            if not tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(values, requires_grad=tensor.requires_grad))
            else:
                part._buffers[name] = values
        for key in [key for key, hook in part._forward_pre_hooks.items() if isinstance(hook, GivenUp)]:
            del part._forward_pre_hooks[key]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Refuses calls of what has no parameters here: a part that the loop calls itself, or a copy of the model."""

    name: str
    """The placed module."""
    ranks: tuple[int, ...]
    """Those that hold its parameters."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raises ModuleContractError, always."""
        where = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        raise ModuleContractError(
            f"the parameters of {self.name!r} are on {where} only, so that it cannot run here: neither a part of it "
            "alone, nor a copy of the model, nor the model within handle.disabled(). A copy that runs, on every rank, "
            "comes of handle.full_state_dict(), and of copying after handle.remove()"
        )


def _own(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (part._parameters, part._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None:
                yield name, tensor
