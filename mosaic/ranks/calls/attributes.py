"""Plain attributes of a module's parts that are set while it trains; ranks compare them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.structure import version_of
from mosaic.find.restore import same

_OF_TORCH = frozenset(vars(nn.Module()))
_COMPARED = (bool, int, float, str, type(None), torch.dtype)


class Attributes:
    """The plain attributes of a module, and the items of lists, dicts and sets among them.

    Attributes:
        own: Those that the module's own forward writes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.own: set[str] = set()
        self._module = module
        self._tables = [vars(part) for part in module.modules()]
        held = [value for table in self._tables for key, value in table.items() if key not in _OF_TORCH]
        self._containers = [value for value in held if isinstance(value, dict | list)]
        self._tensors = [value for value in held if isinstance(value, torch.Tensor)]
        self._first, self._first_values = self.read(), self._values()

    def _values(self) -> list[Any]:
        """Returns what a change of any attribute changes; it costs a copy of each part's table."""
        items = [tuple(held.items()) if isinstance(held, dict) else tuple(held) for held in self._containers]
        return [*(tuple(table.values()) for table in self._tables), *items, *map(version_of, self._tensors)]

    def read(self) -> dict[str, tuple[Any, int | None]]:
        """Returns their values now, and for tensors how often they were written to."""
        return {
            name: (value, version_of(value) if isinstance(value, torch.Tensor) else None)
            for path, part in self._module.named_modules()
            for key, held in list(vars(part).items())
            if key not in _OF_TORCH
            for name, value in _items(f"{path}.{key}".lstrip("."), held)
        }

    def note_own(self, before: dict[str, tuple[Any, int | None]]) -> None:
        """Notes what the module's forward has written since an earlier ``read``."""
        self.own.update(_changed(before, self.read()))

    def set_since(self) -> str:
        """Describes what was set since the first reading, and not by the module itself; the same text on all ranks."""
        if same(self._first_values, self._values()):
            return ""
        now = self.read()
        texts = {name: _text(now[name][0]) for name in _changed(self._first, now) - self.own if name in now}
        return ", ".join(f"{name} = {text}" for name, text in sorted(texts.items()) if text)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{name}[{key!r}]", item) for key, item in items)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if name not in before or name not in after or not same(before[name], after[name])}


def _text(value: Any) -> str:
    """Returns a text for a value, the same in all processes; empty for what cannot be compared across them."""
    if type(value) is torch.Tensor and value.device.type == "cpu":
        content = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"a tensor {tuple(value.shape)} ({zlib.crc32(content)})"
    return repr(value) if isinstance(value, _COMPARED) else ""
