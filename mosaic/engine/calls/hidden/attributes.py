"""Plain attributes of a module's parts, and what their code names besides, as they were at one moment.

Looked at are the values themselves, and what containers, arrays and objects among them hold, two levels deep. Values
are compared as Python compares them; tensors by identity and by how often they were written to; anything else that
cannot be compared by identity.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mosaic.engine.calls.hidden.outside import Place, holds_data, places_of
from mosaic.engine.calls.structure import version_of

_OF_TORCH = frozenset(vars(nn.Module()))
_CLOSED = (
    nn.Module,
    torch.Tensor,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodType,
)
_CONTAINERS = (list, dict, set, deque)
_ATOMS = frozenset((int, float, str, bool, type(None), torch.Tensor, nn.Parameter))
_MAX_ITEMS = 1000  # of more, only the number is looked at
_MAX_ARRAY_BYTES = 1 << 16  # a larger array of numpy's is taken for a table that is only read
_NAMESPACES = ("argparse", "collections", "types", "__main__")

OwnWrites = dict[int, frozenset[str]]
"""By the id of a part, or of something that one refers to, the names that the module's forward itself writes."""
Reading = list[tuple[Any, ...]]
"""One tuple for each part and each thing that was looked into."""
Named = dict[int, tuple[Any, dict[Any, Any]]]
"""Attributes of parts and of what they refer to, by id and name; the object itself keeps the id from another."""


class Attributes:
    """Reads the attributes of one module, again and again.

    Attributes:
        own_writes: What the forward itself writes, and what is therefore passed over.
    """

    def __init__(self) -> None:
        self.own_writes: OwnWrites = {}
        self._inner: dict[int, Any] = {}
        self._tensors: list[torch.Tensor] = []
        self._places: list[Place] = []
        self._outer: list[Any] = []

    def look_into(self, parts: Sequence[nn.Module]) -> None:
        """Notes what the parts and their code refer to by now."""
        self._inner = _open_in(_values_of(parts))
        named: list[tuple[int, str | None, Any]] = []
        for part in parts:
            named += [(id(part), name, value) for name, value in _own(part).items()]
        named += [(key, None, item) for key, value in self._inner.items() for item in _content(value)]
        held = {id(tensor) for part in parts for home in (part._parameters, part._buffers) for tensor in home.values()}
        self._tensors = [
            value
            for key, name, value in named
            if isinstance(value, torch.Tensor) and id(value) not in held and not self._is_own(key, name)
        ]
        self._places = [place for place in places_of(parts) if holds_data(place)]
        outer = _open_in(place.value for place in self._places)
        self._outer = [value for key, value in outer.items() if key not in self._inner]

    def _is_own(self, key: int, name: str | None) -> bool:
        own = self.own_writes.get(key)
        return own is not None and (name is None or name in own)

    def read(self, parts: Sequence[nn.Module]) -> Reading:
        """Returns the attributes' values now; others may be changing them, so that each dict is copied at once."""
        found: Reading = []
        for part in parts:
            values = vars(part)
            own = self.own_writes.get(id(part))
            kept = values.values() if own is None else [v for name, v in list(values.items()) if name not in own]
            found.append((*values["_forward_hooks"].values(), *values["_forward_pre_hooks"].values(), *kept))
        for key, value in self._inner.items():
            if key not in self.own_writes:
                found.append(_content(value))
        return found

    def read_outside(self) -> Reading:
        """Returns what may change without making a call another one, as long as no lane is at it.

        These are the values that the parts' code names, and how often tensors in attributes were written to.
        """
        named = tuple([_seen(place.value) for place in self._places])
        return [named, tuple(map(version_of, self._tensors)), *map(_seen_in, self._outer)]

    def changed_outside(self, before: Reading) -> str | None:
        """Names something that is not as in an earlier ``read_outside``, or returns None."""
        after = self.read_outside()
        if same(before, after):
            return None
        for place, old, new in zip(self._places, before[0], after[0], strict=False):
            if not same(old, new):
                return f"{place.name!r}, which its code names,"
        return "a tensor in an attribute" if before[1] != after[1] else "what a variable holds that its code names"

    def note_writes(self, parts: Sequence[nn.Module], before: Written) -> frozenset[str]:
        """Learns what one forward wrote; returns the names of the first part's, the module's own."""
        for key, names in before.written(_named(parts)).items():
            self.own_writes[key] = self.own_writes.get(key, frozenset()) | names
        return self.own_writes.get(id(parts[0]), frozenset()) if parts else frozenset()


class Written:
    """The attributes of some parts, and what their code names, to tell later which were written.

    Args:
        parts: The parts.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._before = _named(parts)
        self._places = [(place, _seen(place.value)) for place in places_of(parts) if holds_data(place)]
        outer = ((place.name, value) for place, (value, _) in self._places if _is_open(value))
        self._outer = [(name, value, _seen_in(value)) for name, value in outer if id(value) not in self._before]

    def since(self, parts: Sequence[nn.Module], own: OwnWrites) -> str:
        """Returns a text of what was written since, the same in every process that wrote the same; empty for nothing.

        It has numbers, texts, flags and tensors in host memory, but no objects or functions.

        Args:
            parts: The parts now.
            own: What to pass over.
        """
        after, said = _named(parts), []
        for key, names in self.written(after).items():
            thing, values = after[key]
            for name in sorted(names - own.get(key, frozenset()), key=str):
                value = _told(values.get(name))
                said += [f"{type(thing).__name__}.{name} = {value}"] if value else []
        return ", ".join(said)

    def written(self, after: Named) -> dict[int, frozenset[Any]]:
        """Returns the names of attributes that changed, by the id of the part or object that has them."""
        found = {}
        for key, (_, values) in after.items():
            earlier = self._before.get(key, (None, values))[1]
            names = {
                name
                for name in values.keys() | earlier.keys()
                if name not in values or name not in earlier or not same(values[name], earlier[name])
            }
            if names:
                found[key] = frozenset(names)
        return found

    def written_outside(self) -> str | None:
        """Returns the name of something that the code names and that changed, or None."""
        for place, value in self._places:
            if not same(_seen(place.value), value):
                return place.name
        return next((name for name, value, content in self._outer if not same(_seen_in(value), content)), None)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same as far as Python can tell."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # tensors and arrays of several elements answer with as many
        return False


def changed_part(before: Reading, after: Reading, parts: Sequence[nn.Module]) -> str | None:
    """Names the class of the first part whose attributes differ between two readings; None if none does."""
    if same(before, after):
        return None
    if len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if not same(old, new):
                return type(parts[index]).__name__ if index < len(parts) else "an object that it refers to"
    return "the module's parts"


def _named(parts: Sequence[nn.Module]) -> Named:
    found: Named = {id(part): (part, {name: _seen(value) for name, value in _own(part).items()}) for part in parts}
    for key, value in _open_in(_values_of(parts)).items():
        found[key] = (value, dict(enumerate(_seen_in(value))))
    return found


def _told(seen: Any) -> str:
    """Returns a text for a value as it was seen, the same in all processes; empty for what none can tell to others."""
    value = seen[0] if isinstance(seen, tuple) else seen
    if type(value) is torch.Tensor and value.device.type == "cpu":
        content = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"a tensor {tuple(value.shape)} ({zlib.crc32(content)})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else ""


def _own(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _OF_TORCH}


def _values_of(parts: Sequence[nn.Module]) -> Iterator[Any]:
    return (value for part in parts for value in _own(part).values())


def _open_in(values: Iterable[Any]) -> dict[int, Any]:
    return {id(value): value for value in values if _is_open(value)}


def _is_open(value: Any) -> bool:
    if isinstance(value, (*_CONTAINERS, np.ndarray)):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, _CLOSED):
        return False
    home = type(value).__module__.partition(".")[0]
    return home in _NAMESPACES or home not in sys.stdlib_module_names  # locks, loggers and files are no settings


def _content(value: Any, depth: int = 2) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return (value.tobytes(),) if value.dtype != object and value.nbytes <= _MAX_ARRAY_BYTES else ()
    values = value if isinstance(value, _CONTAINERS) else vars(value)
    if len(values) > _MAX_ITEMS:
        return (len(values),)
    items = (*values, *values.values()) if isinstance(values, dict) else tuple(values)
    if depth == 1:
        return items
    return (*items, *[_content(item, depth - 1) for item in items if type(item) not in _ATOMS and _is_open(item)])


def _seen_in(value: Any) -> tuple[Any, ...]:
    return tuple(map(_seen, _content(value)))


def _seen(value: Any) -> tuple[Any, int | None]:
    """Returns a value, and how often it was written to if it is a tensor."""
    return (value, version_of(value) if isinstance(value, torch.Tensor) else None)
