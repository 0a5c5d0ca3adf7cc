"""A retraining folder on disk: its paths, and the small files with each day's state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from mosaic.artifact import load, save
from mosaic.errors import InvalidFileError
from mosaic.lines import append_line
from mosaic.retrain.recipe import RECIPE
from mosaic.retrain.records import Outcome

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@contextmanager
def named_remedy() -> Iterator[None]:
    """Adds the remedy to the error of a damaged file."""
    try:
        yield
    except InvalidFileError as error:
        raise InvalidFileError(
            f"{error}; restore this file from a backup, or, if it is in the folder of a day that is not over, move "
            "days/DAY away: the next run begins that day anew. A damaged version is replaced by another one with "
            "`mosaic retrain promote FOLDER VERSION`"
        ) from None


def load_of_earlier_day(kind: type[_T], path: Path) -> _T | None:
    """Returns a record of an earlier day; None, with a warning, if the file is damaged.

    A day can run without the figures, scores and plans of earlier days.
    """
    if not path.is_file():
        return None
    try:
        return load(kind, path)
    except InvalidFileError as error:
        _LOG.warning("%s; this day goes on without it", error)
        return None


Phase = Literal["prepared", "training", "trained", "evaluated", "decided"]
"""Phase of a day; written after all files of the phase are on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    at: str
    boot: str
    from_step: int
    ended: str = ""
    """End, such as ``done``, ``killed (SIGKILL)``, ``launcher killed``, ``SIGTERM``; empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayState:
    """``state.json``: the state of a day; written last in each phase."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    day: str
    """Name of the day: the newest date of its data."""
    phase: Phase
    new: tuple[str, ...]
    """Dates of new data; a day also takes the data of missed runs."""
    replay: tuple[str, ...]
    """Dates of promoted days to replay."""
    parent: str | None
    """Version in force when the day began; the challenger starts from it."""
    champion: str | None
    """Version in force when the challenger was judged; the gate compares them."""
    anchor: str | None
    """Approved version at that time."""
    began: str
    deadline: str | None
    """Time to release the device, UTC; None for none."""
    starts: tuple[Start, ...] = ()
    outcome: Outcome | None = None
    """Outcome of the day; None before its end."""
    reason: str = ""
    ended: str | None = None
    """End of its last run, UTC; None before."""
    version: str | None = None
    """Name of the challenger; None before it has one."""
    messages: tuple[str, ...] = ()
    """Messages for the morning's report."""

    @property
    def is_over(self) -> bool:
        """True if no run will resume it."""
        return self.outcome not in (None, "interrupted", "failed")


class _File:
    """A file of a folder, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, _: Any = None) -> Path:
        path: Path = folder.path
        return path / self._name


@dataclass(frozen=True, slots=True)
class DayFolder:
    path: Path

    recipe = _File(RECIPE)
    sources = _File("sources.json")
    environment = _File("environment.json")
    plan = _File("plan.json")
    profile = _File("profile.json")
    figures = _File("figures.json")
    data_check = _File("data_check.json")
    facts = _File("facts.json")
    checkpoints = _File("checkpoints")
    metrics = _File("metrics.jsonl")
    trained = _File("trained.json")
    model = _File("model.safetensors")
    scores = _File("scores.json")
    gate = _File("gate.json")
    report = _File("report.json")
    page = _File("report.html")

    @property
    def state(self) -> DayState:
        return load(DayState, self.path / "state.json")

    @property
    def has_begun(self) -> bool:
        return (self.path / "state.json").is_file()

    def set(self, state: DayState, **changes: Any) -> DayState:
        """Writes the day's state atomically, and returns it."""
        changed = replace(state, **changes)
        save(changed, self.path / "state.json")
        return changed


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    recipe = _File(RECIPE)
    history = _File("history.jsonl")
    hold = _File("hold")
    pending = _File("hooks.json")
    versions = _File("versions")
    quarantine = _File("quarantine")

    def day(self, day: str) -> DayFolder:
        return DayFolder(self.path / "days" / day)

    def days(self) -> tuple[DayFolder, ...]:
        days = (DayFolder(path) for path in sorted((self.path / "days").glob("????-??-??")))
        return tuple(day for day in days if day.has_begun)

    def note(self, event: str, **more: Any) -> None:
        append_line(self.history, {"at": utc_text(datetime.now(UTC)), "event": event, **more}, flush=True)


def utc_text(at: datetime) -> str:
    """Formats a time for files: UTC, ISO 8601, whole seconds."""
    return at.astimezone(UTC).isoformat(timespec="seconds")
