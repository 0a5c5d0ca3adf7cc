"""What ``glue.json`` says of a glued model, and what no folder holds."""

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
    """Under which it is a child."""
    model: str
    """Class of its model, ``module:name``; empty for one that is handed over."""
    projector: str
    """Name of its projector, ``own`` or ``none``."""
    token: int | None
    """Its placeholder."""
    width: int | None
    """Of what the projector gets."""
    callbacks: tuple[str, ...]
    """Names of those that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueRecord:
    """What ``glue.json`` holds."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = 1
    language_model: str
    """Class, as a tower's model."""
    has_before: bool
    """Whether features are put into the text by a function of the user's."""
    towers: tuple[TowerRecord, ...]
    """In order."""
    frozen: tuple[str, ...]
    """Names of modules."""
    still: tuple[str, ...]
    """Names of parameters that do not train though nothing froze them; transformers forgets them when it loads."""


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What a folder does not hold; whatever of it is not asked for is an error."""

    modules: Mapping[str, nn.Module]
    """By name, such as ``vision.model`` and ``vision.projector``: their weights are read into them."""
    callbacks: Mapping[str, Callable[..., Any]]
    """By name, such as ``vision.after``, and ``before``."""

    def check(self, record: GlueRecord) -> None:
        """Checks that what the record needs was handed over, and nothing else.

        Raises:
            ValueError: It was not.
        """
        callbacks = {f"{tower.name}.{one}" for tower in record.towers for one in tower.callbacks}
        callbacks |= {"before"} if record.has_before else set()
        modules = {f"{tower.name}.model" for tower in record.towers if not tower.model}
        modules |= {f"{tower.name}.projector" for tower in record.towers if tower.projector == "own"}
        modules |= set() if record.language_model else {LANGUAGE_MODEL}
        for what, needed, given in (("callbacks", callbacks, self.callbacks), ("modules", modules, self.modules)):
            if missing := sorted(needed - given.keys()):
                raise ValueError(
                    f"the model was saved with {what} of its own, which no folder holds: hand over "
                    f"{what}={{{', '.join(f'{name!r}: ...' for name in missing)}}}"
                )
            if strange := sorted(given.keys() - needed):
                raise ValueError(f"{what} has {', '.join(strange)}, and the model was saved without; leave them out")
