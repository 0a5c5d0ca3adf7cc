"""Modes of a model's modules: what loops switch between steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

Modes = tuple[bool | float, ...]
"""Of each module whether it trains, and its other switches and rates."""


def modes_of(modules: Sequence[nn.Module]) -> Modes:
    """Returns the attributes of modules that are switches or rates, such as ``training`` and rates of dropout."""
    return tuple(value for module in modules for value in vars(module).values() if type(value) in (bool, float))
