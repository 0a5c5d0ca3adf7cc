"""Plain attributes of a module's parts that are set while it trains; ranks compare them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.structure import version_of
from mosaic.find.restore import same

_OF_TORCH = frozenset(vars(nn.Module()))
_COMPARED = (bool, int, float, str, type(None), torch.dtype)

_Values = dict[str, tuple[Any, int | None]]
"""Values by name, and for tensors how often they were written to."""


class _Part:
    """The attributes of one part, as they were first."""

    def __init__(self, path: str, part: nn.Module) -> None:
        self._path = path
        self._own = vars(part)
        self._keys = [key for key in self._own if key not in _OF_TORCH]
        self._held = [self._own[key] for key in self._keys]
        self._size = len(self._own)
        self._may_change_inside = any(isinstance(held, dict | list | torch.Tensor) for held in self._held)
        self.first = self.read()

    def read(self) -> _Values:
        return {
            name: (value, version_of(value) if isinstance(value, torch.Tensor) else None)
            for key, held in list(self._own.items())
            if key not in _OF_TORCH
            for name, value in _items(f"{self._path}.{key}".lstrip("."), held)
        }

    @property
    def is_as_first(self) -> bool:
        """True if surely nothing was set; most parts answer so at each call, in a microsecond."""
        if self._may_change_inside or len(self._own) != self._size:
            return False
        return all(map(is_, map(self._own.get, self._keys), self._held))


class Attributes:
    """The plain attributes of a module, and the items of lists and dicts among them.

    Attributes:
        own: Those that the module's own forward writes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.own: set[str] = set()
        self._parts = [_Part(path, part) for path, part in module.named_modules()]

    def read(self) -> _Values:
        """Returns their values now."""
        return {name: value for part in self._parts for name, value in part.read().items()}

    def note_own(self, before: _Values) -> None:
        """Notes what the module's forward has written since an earlier ``read``."""
        self.own.update(_changed(before, self.read()))

    def set_since(self) -> str:
        """Describes what was set since the first reading, and not by the module itself; the same text on all ranks."""
        texts: dict[str, str] = {}
        for part in self._parts:
            if not part.is_as_first:
                now = part.read()
                texts |= {name: _text(now[name][0]) for name in _changed(part.first, now) - self.own if name in now}
        return ", ".join(f"{name} = {text}" for name, text in sorted(texts.items()) if text)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{name}[{key!r}]", item) for key, item in items)


def _changed(before: _Values, after: _Values) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if name not in before or name not in after or not same(before[name], after[name])}


def _text(value: Any) -> str:
    """Returns a text for a value, the same in all processes; empty for what cannot be compared across them."""
    if type(value) is torch.Tensor and value.device.type == "cpu":
        content = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"a tensor {tuple(value.shape)} ({zlib.crc32(content)})"
    return repr(value) if isinstance(value, _COMPARED) else ""
