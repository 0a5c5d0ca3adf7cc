"""Weights that a rank does not need: moved to the meta device, and stood in for while a chunk runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def drop_weights(model: nn.Module, *, keep: Collection[str], whole: Iterable[nn.Module]) -> None:
    """Moves parameters to the meta device, so that their memory is free; the objects stay, for optimizers and ties.

    Args:
        model: The user's model.
        keep: First names of the parameters that stay.
        whole: Modules that do not run here: their buffers go too.
    """
    for name, parameter in model.named_parameters():
        if name not in keep and not parameter.is_meta:
            parameter.grad = None
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
    for module in whole:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[name] = buffer.to("meta")


class StandIns:
    """Zeros without memory in the place of parameters that operations between modules may look at.

    Args:
        model: The user's model, its foreign weights on the meta device.
        inside: Modules that hold parameters which nobody else looks at.
        device: Of the model before.
    """

    def __init__(self, model: nn.Module, *, inside: Iterable[nn.Module], device: torch.device) -> None:
        hidden = {id(module) for layer in inside for module in layer.modules()}
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]] = []
        for module in model.modules():
            if id(module) in hidden:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    zero = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                    self._places.append((module._parameters, name, parameter, zero))

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
