"""What the code of a module's parts names besides their attributes: those of classes, enclosed variables, and globals.

Looked at are classes that are neither torch's nor Python's own, their methods, and functions among the parts' hooks and
attributes; not the functions that these call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

_LEFT_ALONE = sys.stdlib_module_names | {"torch", "numpy", "mosaic"}
_NO_DATA = (type, ModuleType, BuiltinFunctionType, nn.Module)
_GONE = object()


class Place(NamedTuple):
    """Where a value is."""

    name: str
    """Its name there."""
    home: Mapping[str, Any] | CellType
    """Globals, a class's attributes, or the cell of an enclosed variable."""

    @property
    def value(self) -> Any:
        """What is there now."""
        if not isinstance(self.home, CellType):
            return self.home.get(self.name, _GONE)
        try:
            return self.home.cell_contents
        except ValueError:  # nothing is in it yet
            return _GONE


def places_of(parts: Sequence[nn.Module]) -> list[Place]:
    """Returns the places that the code of parts names, each once, whatever is there."""
    found: dict[tuple[int, str], Place] = {}
    for place in _all_places(parts):
        found.setdefault((id(place.home), place.name), place)
    return list(found.values())


def holds_data(place: Place) -> bool:
    """Whether there is something that may change, rather than code."""
    value = place.value
    return not isinstance(value, _NO_DATA) and not hasattr(type(value), "__get__")  # functions and descriptors


def _all_places(parts: Sequence[nn.Module]) -> Iterator[Place]:
    seen: set[type] = set()
    for part in parts:
        for kind in type(part).__mro__:
            if kind not in seen and not _is_left_alone(kind.__module__) and "_mosaic_plain" not in vars(kind):
                seen.add(kind)
                for name, value in vars(kind).items():
                    if not name.startswith("__"):
                        yield Place(name, vars(kind))
                    yield from _named_by(value)
        for value in (*part._forward_hooks.values(), *part._forward_pre_hooks.values(), *vars(part).values()):
            yield from _named_by(value)


def _named_by(value: Any) -> Iterator[Place]:
    while isinstance(value, functools.partial):
        value = value.func
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if not isinstance(function, FunctionType) or _is_left_alone(function.__module__ or "builtins"):
        return
    todo: list[CodeType] = [function.__code__]
    for code in todo:  # which grows meanwhile
        for name in code.co_names:
            if name in function.__globals__:
                yield Place(name, function.__globals__)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Place(name, cell)


def _is_left_alone(module: str) -> bool:
    return module.partition(".")[0] in _LEFT_ALONE
