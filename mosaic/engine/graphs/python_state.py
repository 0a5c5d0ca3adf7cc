"""What Python decides by in a module: attributes of its parts, what their code names, and context variables.

A replay runs no Python. Values are compared, lists, tuples, dicts and sets by what is in them if that is no more than
100 things, objects by their identity and attributes; other things, such as functions, by identity. What functions read
that the code of the parts calls, and what a thread keeps for itself (``threading.local``), cannot be known.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.hidden.outside import holds_data, places_of
from mosaic.engine.calls.structure import PLAIN_TYPES, memory_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_GONE = object()
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_DEPTH = 4
_MAX_ITEMS = 100


class PythonState:
    """Attributes of parts, and what their code names, as they are when this is made; tensors of parts' own apart.

    Args:
        parts: Parts of a module by their paths.

    Attributes:
        plain: Values in attributes of parts, each with its name, where it is, and its key there.
    """

    def __init__(self, parts: list[tuple[str, nn.Module]]) -> None:
        self.plain: list[tuple[str, dict[str, Any], str, Any]] = []
        self._other: list[tuple[str, Mapping[str, Any], str, Any]] = []
        self._inner: dict[int, tuple[str, Any, _Content]] = {}
        self._sizes: list[tuple[str, Mapping[str, Any], int]] = []
        self._forwards = [(path, part, _forward_of(part)) for path, part in parts]
        self._context = dict(contextvars.copy_context().items())
        for path, part in parts:
            for home in (part._parameters, part._buffers, vars(part)):
                self._sizes.append((path, home, len(home)))
                self._note(path, home)
        places = places_of([part for _, part in parts])
        self._named = [(place, _content(place.value)) for place in places if holds_data(place)]

    def _note(self, path: str, home: Mapping[str, Any]) -> None:
        for key, value in home.items():
            name = f"{path}.{key}" if path else key
            if key in _OF_EVERY_MODULE or isinstance(value, torch.Tensor) or key.startswith("__"):
                continue
            if isinstance(value, PLAIN_TYPES) and isinstance(home, dict):
                self.plain.append((name, home, key, value))
            elif isinstance(value, (*PLAIN_TYPES, *_CONTAINERS)):
                self._other.append((name, home, key, _content(value)))
            else:
                self._other.append((name, home, key, value))
                if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
                    self._inner.setdefault(id(value), (name, value, _content(vars(value))))

    def change(self) -> str | None:
        """Returns which attribute of a part is no longer as it was, or None."""
        for name, home, key, value in self.plain:
            now = home.get(key, _GONE)
            if now is not value and not (type(now) is type(value) and now == value):
                return f"its attribute {name!r} changed"
        for path, place, size in self._sizes:
            if len(place) != size:
                return f"{path or 'it'!r} got or lost an attribute"
        for path, part, forward in self._forwards:
            if _forward_of(part) is not forward:
                return f"{path or 'it'!r} got another forward"
        return None

    def change_inside(self) -> str | None:
        """Returns what else is no longer as it was: the contents of an attribute, or a context variable."""
        for name, place, key, value in self._other:
            now = place.get(key, _GONE)
            if now is not value and (type(value) is not _Content or _content(now) != value):
                return f"its attribute {name!r} changed"
        for name, owner, value in self._inner.values():
            if _content(vars(owner)) != value:
                return f"what its attribute {name!r} holds changed"
        for named, value in self._named:
            if _content(named.value) != value:
                return f"{named.name!r}, which its code names, changed"
        now = contextvars.copy_context()
        for variable in {*self._context, *now}:
            one, other = self._context.get(variable, _GONE), now.get(variable, _GONE)
            if one is not other and _content(one) != _content(other):
                return f"the context variable {variable.name!r} changed"
        return None


class _Content(tuple[Any, ...]):
    """What is in a value, to be compared."""

    __slots__ = ()


class _Object:
    """Equal for one object alone, which it keeps, so that no other gets its id."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _content(value: Any, depth: int = _MAX_DEPTH) -> _Content:
    kind = type(value)
    if isinstance(value, PLAIN_TYPES):
        return _Content((kind, value))
    if isinstance(value, torch.Tensor):
        return _Content((_Object(value), memory_of(value)))
    if not depth or not isinstance(value, _CONTAINERS):
        return _Content((_Object(value),))
    if len(value) > _MAX_ITEMS:
        return _Content((_Object(value), len(value)))
    if isinstance(value, dict):
        return _Content((kind, *((_content(key, depth - 1), _content(value[key], depth - 1)) for key in value)))
    items = (_content(item, depth - 1) for item in value)
    return _Content((kind, frozenset(items))) if isinstance(value, (set, frozenset)) else _Content((kind, *items))


def _forward_of(part: nn.Module) -> Any:
    return getattr(type(part), "forward", None)
