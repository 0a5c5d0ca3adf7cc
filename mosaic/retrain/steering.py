"""Manual control: promote a version, roll back, hold promotions, and show the status."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mosaic.artifact import write_text
from mosaic.errors import MosaicError
from mosaic.lines import lines_of
from mosaic.retrain import arrivals, hooks, versions
from mosaic.retrain.folder import Folder, utc_text
from mosaic.retrain.lock import held, holder
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.records import HEADLINES


def promote(root: Path, version: str) -> str:
    """Makes a version the champion and, since a person approves it, the anchor; returns a sentence.

    Raises:
        MosaicError: The version does not exist, or a run holds the folder.
    """
    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    name = versions.find(folder, version).name
    with held(root, utc_text(datetime.now(UTC))):
        day = versions.Version(folder.versions / name).card.day
        hooks.remember(folder, recipe.promote, name, day)
        versions.promote(folder, name, by="a person")
        if versions.linked(folder, "anchor") != name:
            folder.note("approved", anchor=name)
            versions.point(folder, "anchor", name)
        failed = hooks.run_pending(folder, recipe.promote, name)
    return "; ".join((f"{name} is the champion and the anchor", *failed))


def rollback(root: Path) -> str:
    """Makes the previous champion the champion again; returns a sentence.

    Raises:
        MosaicError: No earlier champion is known, or a run holds the folder.
    """
    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    with held(root, utc_text(datetime.now(UTC))):
        now, before = versions.linked(folder, "champion"), versions.previous(folder)
        if now is None or before is None:
            raise MosaicError(
                f"{root} has no version before {now or 'the first'} to go back to; "
                f"`mosaic retrain promote {root} VERSION` names one"
            )
        hooks.remember(folder, recipe.promote, before, versions.Version(folder.versions / before).card.day)
        folder.note("rolled back", champion=before, before=None, by="a person", instead_of=now)
        versions.point(folder, "champion", before)
        failed = hooks.run_pending(folder, recipe.promote, before)
    return "; ".join((f"{before} is the champion again, in the place of {now}", *failed))


def hold(root: Path, *, off: bool) -> str:
    """Stops or allows promotions by the gate; returns a sentence."""
    folder = Folder(root)
    read_recipe(folder.recipe)
    if off:
        folder.hold.unlink(missing_ok=True)
    else:
        write_text(f"since {utc_text(datetime.now(UTC))}\n", folder.hold)
    folder.note("hold is off" if off else "hold is on")
    return "the gate promotes again" if off else "days are trained and judged, and nothing is promoted"


def status_of(root: Path, days: int = 7) -> Iterator[str]:
    """Yields the status of a folder, line by line.

    Raises:
        MosaicError: The recipe is invalid or a file is damaged; names it.
    """
    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    yield holder(root)
    for link in ("champion", "anchor"):
        name = versions.linked(folder, link)
        yield f"{link}: {name or 'none yet'}{_rolled_back(folder, name) if link == 'champion' else ''}"
    if folder.hold.exists():
        yield "hold is on: nothing is promoted"
    for day in folder.days()[-days:]:
        state = day.state
        word = HEADLINES[state.outcome].lower() if state.outcome is not None else state.phase
        yield f"{state.day}: {word}{f': {state.reason}' if state.reason else ''}"
    new = arrivals.new_dates(folder, recipe)
    yield f"new data: {', '.join(new) or 'none'}"
    opens = recipe.budget.opens(datetime.now(UTC))
    if opens is not None:
        yield f"the window opens at {utc_text(opens)}"
    for hook in hooks.pending(folder):
        yield f"hook {hook.command!r} is pending for version {hook.version} ({hook.tries} tries)"


def _rolled_back(folder: Folder, champion: str | None) -> str:
    """Describes the rollback that set the champion; empty for none."""
    champions = [row for row in lines_of(folder.history) if row.get("champion") is not None]
    last: dict[str, Any] = champions[-1] if champions else {}
    if last.get("event") != "rolled back" or last["champion"] != champion:
        return ""
    return f", rolled back from {last.get('instead_of', 'a later one')} at {last['at']}"
