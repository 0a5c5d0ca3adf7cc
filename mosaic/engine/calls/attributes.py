"""Plain attributes of a module's parts, as they were at one moment: what its forward reads besides tensors.

Looked at are the attributes themselves, and what lists, dicts, sets and objects among them hold, one level deep. Values
are compared as Python compares them; tensors and anything else that cannot be compared, by identity.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CLOSED = (
    nn.Module,
    torch.Tensor,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodType,
)
_NAMESPACES = ("argparse", "collections", "types", "__main__")

OwnWrites = dict[int, frozenset[str]]
"""By the id of a part, or of something that one refers to, the names that the module's forward itself writes."""
Reading = list[tuple[Any, ...]]
"""One tuple for each part and each thing that was looked into."""


class Attributes:
    """Reads the attributes of one module, again and again.

    Attributes:
        own_writes: What the forward itself writes, and what is therefore passed over.
    """

    def __init__(self) -> None:
        self.own_writes: OwnWrites = {}
        self._inner: dict[int, Any] = {}

    def look_into(self, parts: Sequence[nn.Module]) -> None:
        """Notes the lists, dicts, sets and objects that the parts refer to by now."""
        self._inner = {id(value): value for value in _inner_of(parts)}

    def read(self, parts: Sequence[nn.Module]) -> Reading:
        """Returns the attributes' values now."""
        found: Reading = []
        for part in parts:
            values = vars(part)
            own = self.own_writes.get(id(part))
            kept = values.values() if own is None else (value for name, value in values.items() if name not in own)
            found.append((len(values["_forward_hooks"]), len(values["_forward_pre_hooks"]), *kept))
        for key, value in self._inner.items():
            if key not in self.own_writes:
                found.append(_content(value))
        return found

    def note_writes(self, parts: Sequence[nn.Module], before: Written) -> frozenset[str]:
        """Learns what one forward wrote; returns the names of the first part's, the module's own."""
        for key, (_, names) in before.written(_named(parts)).items():
            self.own_writes[key] = self.own_writes.get(key, frozenset()) | names
        return self.own_writes.get(id(parts[0]), frozenset()) if parts else frozenset()


class Written:
    """The attributes of some parts by name, to tell later which were written.

    Args:
        parts: The parts.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._before = _named(parts)

    def since(self, parts: Sequence[nn.Module], own: OwnWrites) -> str:
        """Returns a text of what was written since, the same in every process that wrote the same; empty for nothing.

        It has numbers, texts, flags and tensors in host memory, but no objects or functions.

        Args:
            parts: The parts now.
            own: What to pass over.
        """
        after, said = _named(parts), []
        for key, (thing, names) in self.written(after).items():
            for name in sorted(names - own.get(key, frozenset()), key=str):
                value = _told(after[key][1].get(name))
                said += [f"{type(thing).__name__}.{name} = {value}"] if value else []
        return ", ".join(said)

    def written(self, after: dict[int, tuple[Any, dict[Any, Any]]]) -> dict[int, tuple[Any, frozenset[Any]]]:
        """Returns by id what changed, and under which names."""
        found = {}
        for key, (thing, values) in after.items():
            earlier = self._before.get(key, (thing, values))[1]
            names = {
                name
                for name in values.keys() | earlier.keys()
                if name not in values or name not in earlier or not same(values[name], earlier[name])
            }
            if names:
                found[key] = (thing, frozenset(names))
        return found


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


def _named(parts: Sequence[nn.Module]) -> dict[int, tuple[Any, dict[Any, Any]]]:
    """Returns the attributes of parts and of what they refer to, by id and name."""
    found: dict[int, tuple[Any, dict[Any, Any]]] = {}
    for part in parts:
        found[id(part)] = (part, {name: value for name, value in vars(part).items() if name not in _OF_TORCH})
    for value in _inner_of(parts):
        found[id(value)] = (value, dict(enumerate(_content(value))))
    return found


def _told(value: Any) -> str:
    """Returns a text for a value, the same in all processes; empty for what none can tell to others."""
    if type(value) is torch.Tensor and value.device.type == "cpu":
        content = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"a tensor {tuple(value.shape)} ({zlib.crc32(content)})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else ""


def _inner_of(parts: Sequence[nn.Module]) -> Iterator[Any]:
    for part in parts:
        for name, value in vars(part).items():
            if name not in _OF_TORCH and _is_open(value):
                yield value


def _is_open(value: Any) -> bool:
    if isinstance(value, (list, dict, set)):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, _CLOSED):
        return False
    home = type(value).__module__.partition(".")[0]
    return home in _NAMESPACES or home not in sys.stdlib_module_names  # locks, loggers and files are no settings


def _content(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return tuple(value) if isinstance(value, (list, set)) else tuple(vars(value).values())
