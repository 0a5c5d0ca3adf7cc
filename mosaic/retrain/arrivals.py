"""New days and days to replay, read from the folders and independent of a clock."""

from __future__ import annotations

from datetime import date

from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.recipe import Recipe


def ready_dates(folder: Folder, recipe: Recipe) -> tuple[str, ...]:
    """Returns the dates whose data folder is complete, the oldest first."""
    new = recipe.sources.new
    before, after = new.path.split("{day}")
    dates = []
    for marker in folder.path.glob(f"{before}*{after}/{new.ready}"):
        path = marker.parent.relative_to(folder.path).as_posix()
        day = path[len(before) : len(path) - len(after)]
        if _is_date(day):
            dates.append(day)
    return tuple(sorted(dates))


def new_dates(folder: Folder, recipe: Recipe) -> tuple[str, ...]:
    """Returns the dates that no day has used, missed days included."""
    used = {date for day in folder.days() if not _is_released(folder, day) for date in day.state.new}
    return tuple(date for date in ready_dates(folder, recipe) if date not in used)


def replay_dates(folder: Folder, recipe: Recipe) -> tuple[str, ...]:
    """Returns the dates to replay: those of the last promoted days."""
    promoted = [date for day in folder.days() if day.state.outcome == "promoted" for date in day.state.new]
    ready, count = set(ready_dates(folder, recipe)), recipe.sources.replay.days
    return tuple(sorted(date for date in promoted if date in ready)[-count:]) if count else ()


def archive(day: DayFolder) -> None:
    """Archives a day whose data another day uses."""
    count = sum(1 for _ in day.path.parent.glob(f"{day.path.name}.*"))
    day.path.rename(day.path.with_name(f"{day.path.name}.{count + 1}"))


def _is_released(folder: Folder, day: DayFolder) -> bool:
    """Returns True if a person removed a quarantined day's note, which makes its data new again."""
    state = day.state
    notes = (folder.quarantine / f"{date}.json" for date in state.new)
    return state.outcome == "quarantined" and not any(note.exists() for note in notes)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
