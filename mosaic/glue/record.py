"""Content of ``glue.json``, and the modules and callbacks that the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRecord:
    """A tower, without its weights."""

    name: str
    """Name of the child."""
    model: str
    """Class of its model, ``module:name``; empty for one that the caller passes."""
    projector: str
    """Name of its projector, ``own`` or ``none``."""
    token: int | None
    """Its placeholder."""
    width: int | None
    """Width of the projector's input."""
    callbacks: tuple[str, ...]
    """Names of its callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueRecord:
    """Content of ``glue.json``."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = 1
    language_model: str
    """Class, as in a tower."""
    has_before: bool
    """True if a function of the user puts features into the text."""
    towers: tuple[TowerRecord, ...]
    frozen: tuple[str, ...]
    still: tuple[str, ...]
    """Names of parameters that never train; transformers forgets them when it loads."""


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """Modules and callbacks that a folder does not hold; unknown ones are an error."""

    modules: Mapping[str, nn.Module]
    """By name, such as ``vision.model`` and ``vision.projector``: they receive their weights."""
    callbacks: Mapping[str, Callable[..., Any]]
    """By name, such as ``vision.after``, and ``before``."""

    def check(self, record: GlueRecord) -> None:
        """Checks the names against the record.

        Raises:
            ValueError: A needed object is missing, or an unneeded one is there.
        """
        callbacks = {f"{tower.name}.{callback}" for tower in record.towers for callback in tower.callbacks}
        callbacks |= {"before"} if record.has_before else set()
        modules = {f"{tower.name}.model" for tower in record.towers if not tower.model}
        modules |= {f"{tower.name}.projector" for tower in record.towers if tower.projector == "own"}
        modules |= set() if record.language_model else {LANGUAGE_MODEL}
        for kind, needed, objects in (("callbacks", callbacks, self.callbacks), ("modules", modules, self.modules)):
            if missing := sorted(needed - objects.keys()):
                raise ValueError(
                    f"the model was saved with its own {kind}, which a folder does not hold: pass "
                    f"{kind}={{{', '.join(f'{name!r}: ...' for name in missing)}}}"
                )
            if unknown := sorted(objects.keys() - needed):
                raise ValueError(f"{kind} has {', '.join(unknown)}, and the model was saved without; leave them out")
