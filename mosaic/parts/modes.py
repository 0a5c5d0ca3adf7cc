"""Modes of a model's modules, which loops switch between steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


class Modes:
    """The attributes of a model's modules that are switches or rates, such as ``training`` and rates of dropout."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (vars(module), name)
            for module in model.modules()
            for name, value in vars(module).items()
            if type(value) in (bool, float) or _is_whole_rate(module, value)
        ]

    def now(self) -> Hashable:
        """Returns their values."""
        return tuple([attributes.get(name) for attributes, name in self._places])


def _is_whole_rate(module: nn.Module, value: Any) -> bool:
    """Returns True for a whole dropout rate; other whole numbers may be the loop's counters."""
    return isinstance(module, _DropoutNd) and type(value) is int
