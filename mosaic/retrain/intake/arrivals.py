"""New days and days to replay, read from the folders and independent of a clock."""

from __future__ import annotations

from datetime import date

from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.recipe import Recipe


class Arrivals:
    """The data folders of a recipe.

    Args:
        folder: The retraining folder.
        recipe: Recipe with the data folders.
    """

    def __init__(self, folder: Folder, recipe: Recipe) -> None:
        self._folder = folder
        self._recipe = recipe

    def ready(self) -> tuple[str, ...]:
        """Returns the dates with a ready folder, the oldest first."""
        new = self._recipe.sources.new
        before, after = new.path.split("{day}")
        dates = []
        for marked in self._folder.path.glob(f"{before}*{after}/{new.ready}"):
            path = marked.parent.relative_to(self._folder.path).as_posix()
            day = path[len(before) : len(path) - len(after)]
            if _is_date(day):
                dates.append(day)
        return tuple(sorted(dates))

    def new(self) -> tuple[str, ...]:
        """Returns the dates that no day has used, missed days included."""
        used = {date for day in self._folder.days() if not self._is_released(day) for date in day.state.new}
        return tuple(date for date in self.ready() if date not in used)

    def replay(self) -> tuple[str, ...]:
        """Returns the dates to replay: those of the last promoted days."""
        promoted = [date for day in self._folder.days() if day.state.outcome == "promoted" for date in day.state.new]
        there = set(self.ready())
        count = self._recipe.sources.replay.days
        return tuple(sorted(date for date in promoted if date in there)[-count:]) if count else ()

    def _is_released(self, day: DayFolder) -> bool:
        """True if a person removed a quarantined day's note, which makes its data new again."""
        state = day.state
        notes = (self._folder.quarantine / f"{date}.json" for date in state.new)
        return state.outcome == "quarantined" and not any(note.exists() for note in notes)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def archive(day: DayFolder) -> None:
    """Archives a day whose data another day uses."""
    count = sum(1 for _ in day.path.parent.glob(f"{day.path.name}.*"))
    day.path.rename(day.path.with_name(f"{day.path.name}.{count + 1}"))
