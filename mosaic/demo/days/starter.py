"""The files of a new, working folder: a recipe, a model file, a first day of data and a frozen set."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from importlib import resources
from pathlib import Path

from mosaic.demo.days.digits import DayKind, write_day, write_frozen
from mosaic.errors import MosaicError

TEMPLATES = ("retrain.toml", "train.py")


def write_starter(
    folder: Path, day: date | None = None, *, num_rows: int = 800, num_frozen: int = 1800
) -> tuple[Path, ...]:
    """Writes recipe, model file, one ready day and the frozen set; overwrites nothing.

    Args:
        folder: Target folder; created if missing.
        day: The ready day; None for yesterday in UTC.
        num_rows: Rows of the day.
        num_frozen: Rows of the frozen set.

    Returns:
        The written paths: two files and two folders.

    Raises:
        MosaicError: One of them exists already (then nothing is written), or the extra ``demo`` is missing.
    """
    day = day if day is not None else datetime.now(UTC).date() - timedelta(days=1)
    files = tuple(folder / name for name in TEMPLATES)
    first, frozen = folder / "data" / day.isoformat(), folder / "data" / "frozen"
    for path in (*files, first, frozen):
        if path.exists():
            raise MosaicError(f"{path} is there already and is not overwritten; move it away, or name another folder")
    write_frozen(frozen, num_rows=num_frozen)  # first: without the extra, nothing is written
    write_day(first, DayKind(num_rows=num_rows), seed=1)
    for path in files:
        path.write_bytes(template(path.name))
    return (*files, first, frozen)


def template(name: str) -> bytes:
    """Returns the text of a file of ``TEMPLATES``."""
    return (resources.files("mosaic.demo.days.template") / name).read_bytes()
