"""Plain attributes of a module's parts that are set while it trains; ranks compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mosaic.find.restore import same

_OF_TORCH = frozenset(vars(nn.Module()))
_COMPARED = (bool, int, float, str, type(None), torch.dtype)
"""Types of values with the same text in all processes."""

_Reading = list[dict[str, Any]]
"""The attributes of each part."""


class Attributes:
    """The plain attributes of a module; not what objects among them hold."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(f"{path}." if path else "", vars(part)) for path, part in module.named_modules()]
        self._own: set[str] = set()
        self._first = self.read()

    def read(self) -> _Reading:
        """Returns their values now."""
        return [{key: own[key] for key in [*own] if key not in _OF_TORCH} for _, own in self._parts]

    def note_own(self, before: _Reading) -> None:
        """Notes what the module's forward has written since an earlier ``read``."""
        self._own.update(self._changed(before))

    def set_since(self) -> str:
        """Describes what was set since the first reading, and not by the module itself; the same text on all ranks."""
        changed = {name: value for name, value in self._changed(self._first).items() if name not in self._own}
        return ", ".join(f"{name} = {value!r}" for name, value in sorted(changed.items()) if type(value) in _COMPARED)

    def _changed(self, before: _Reading) -> dict[str, Any]:
        changed = {}
        for (prefix, own), first in zip(self._parts, before, strict=True):
            for key in [key for key, value in [*own.items()] if key not in _OF_TORCH and value is not first.get(key)]:
                if key not in first or not same(own[key], first[key]):
                    changed[prefix + key] = own[key]
        return changed
