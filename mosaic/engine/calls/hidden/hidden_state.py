"""What a module reads besides its arguments, as it was when it was called.

Torch's settings of the thread and Python's context go with the call to its lane (``ThreadState``, ``contextvars``). The
rest stays where it is, and the lane looks whether it is still what it was: parameters and buffers, plain attributes,
and torch's settings of the process. ``docs/limits.md`` has the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mosaic.engine.calls.hidden.attributes import Attributes, Reading, changed_part
from mosaic.engine.calls.hidden.process_settings import Settings, changed_setting, read_settings
from mosaic.engine.calls.structure import version_of


class Parts(NamedTuple):
    """A module taken apart."""

    modules: list[nn.Module]
    """All its parts; itself first."""
    modes: tuple[bool, ...]
    """Their training modes."""
    trained: list[nn.Parameter]
    """The distinct parameters that take a gradient."""
    tensors: list[torch.Tensor]
    """All parameters, and behind them all buffers."""
    num_parameters: int
    """How many of ``tensors`` are parameters."""


def parts_of(module: nn.Module | None) -> Parts:
    """Takes a module apart; nothing for a function."""
    modules: list[nn.Module] = [] if module is None else [module]
    trained: dict[int, nn.Parameter] = {}
    parameters: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    for part in modules:  # which grows meanwhile
        for parameter in part._parameters.values():
            if parameter is not None:
                parameters.append(parameter)
                if parameter.requires_grad:
                    trained[id(parameter)] = parameter
        buffers += [buffer for buffer in part._buffers.values() if buffer is not None]
        modules += [child for child in part._modules.values() if child is not None]
    modes = tuple([part.training for part in modules])
    return Parts(modules, modes, list(trained.values()), parameters + buffers, len(parameters))


@dataclass(frozen=True, slots=True)
class HiddenState:
    """The hidden state of one call."""

    settings: Settings
    """Torch's, of the process."""
    attributes: Reading
    """Of all parts."""
    outside: Reading
    """What their code names besides."""
    versions: Sequence[int | None]
    """How often each parameter and buffer was written to."""

    @staticmethod
    def take(attributes: Attributes, parts: Parts) -> HiddenState:
        """Reads it, to be compared with later."""
        versions = [version_of(tensor) for tensor in parts.tensors]
        return HiddenState(read_settings(), attributes.read(parts.modules), attributes.read_outside(), versions)

    def written(self, parts: Parts, *, writes_buffers: bool) -> str | None:
        """Says whose tensors were written to since, or None.

        Args:
            parts: The module now.
            writes_buffers: Whether the module itself writes into its buffers.
        """
        versions = [version_of(tensor) for tensor in parts.tensors]
        num = parts.num_parameters
        if versions[:num] != self.versions[:num]:
            return "a parameter"
        return None if writes_buffers or versions == self.versions else "a buffer"

    def changed(self, attributes: Attributes, parts: Parts) -> str | None:
        """Says what else is another than it was, or None."""
        setting = changed_setting(self.settings, read_settings())
        if setting is not None:
            return f"torch's setting of the process ({setting})"
        changed = changed_part(self.attributes, attributes.read(parts.modules), parts.modules)
        if changed is not None:
            return f"an attribute ({changed})"
        return attributes.changed_outside(self.outside)
