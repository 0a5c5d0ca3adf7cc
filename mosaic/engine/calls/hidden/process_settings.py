"""Settings of torch that belong to the whole process: a lane cannot have its own, so they must not change under it."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.find.torch_settings import read, settings_of

_OF_PROCESS = settings_of("process")

Settings = tuple[Any, ...]


def read_settings() -> Settings:
    """Returns the value of each setting now."""
    return read(_OF_PROCESS)


def changed_setting(before: Settings, after: Settings) -> str | None:
    """Names the first setting that differs, or None."""
    if before == after:
        return None
    return next(setting.name for setting, old, new in zip(_OF_PROCESS, before, after, strict=True) if old != new)


class SettingsWatch(TorchDispatchMode):
    """Notes whether a setting changes while a call runs, though it may be changed back before the end.

    Attributes:
        changed: The first such setting, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: str | None = None
        self._before = read_settings()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged."""
        self.look()
        return func(*args, **(kwargs or {}))

    def look(self) -> None:
        """Compares the settings with those at the start."""
        self.changed = self.changed or changed_setting(self._before, read_settings())
