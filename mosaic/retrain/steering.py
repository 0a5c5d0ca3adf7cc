"""Manual control: promote a version, roll back, hold promotions, and show the status."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from mosaic.artifact import lines_of, write_text
from mosaic.errors import MosaicError
from mosaic.retrain import hooks, versions
from mosaic.retrain.folder import OUTCOMES, Folder, new_dates, utc_text
from mosaic.retrain.lock import held, holder
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.workers import last_step


def promote(root: Path, version: str) -> str:
    """Makes a version the champion and, since a person approves it, the anchor; returns a sentence."""
    folder = Folder(root)
    recipe, chosen = read_recipe(folder.recipe), versions.find(folder, version)
    with held(root, utc_text()):
        hooks.remember(folder, recipe.promote, chosen.name, chosen.card.day)
        versions.promote(folder, chosen.name, by="a person")
        if versions.linked(folder, "anchor") != chosen.name:
            folder.note("approved", anchor=chosen.name)
            versions.point(folder, "anchor", chosen.name)
        failures = hooks.run_pending(folder, recipe.promote, chosen.name)
    return "; ".join((f"{chosen.name} is the champion and the anchor", *failures))


def rollback(root: Path) -> str:
    """Makes the previous champion the champion again; returns a sentence."""
    folder = Folder(root)
    recipe = read_recipe(folder.recipe)
    with held(root, utc_text()):
        now, before = versions.linked(folder, "champion"), versions.previous(folder)
        if now is None or before is None:
            raise MosaicError(
                f"{root} has no version before {now or 'the first'} to go back to; "
                f"`mosaic retrain promote {root} VERSION` names one"
            )
        hooks.remember(folder, recipe.promote, before, versions.find(folder, before).card.day)
        folder.note("rolled back", champion=before, before=None, by="a person", instead_of=now)
        versions.point(folder, "champion", before)
        failures = hooks.run_pending(folder, recipe.promote, before)
    return "; ".join((f"{before} is the champion again, in the place of {now}", *failures))


def hold(root: Path, *, off: bool) -> str:
    """Stops or allows promotions by the gate; returns a sentence."""
    folder = Folder(root)
    read_recipe(folder.recipe)
    if off:
        folder.hold.unlink(missing_ok=True)
    else:
        write_text(f"since {utc_text()}\n", folder.hold)
    folder.note("hold is off" if off else "hold is on")
    return "the gate promotes again" if off else "days are trained and judged, and nothing is promoted"


def status_of(root: Path, days: int = 7) -> Iterator[str]:
    """Yields the status of a folder, line by line."""
    folder = Folder(root)
    recipe, champion = read_recipe(folder.recipe), versions.linked(folder, "champion")
    changes = [row for row in lines_of(folder.history) if row.get("champion") is not None]
    rollback = ""
    if changes and (changes[-1]["event"], changes[-1]["champion"]) == ("rolled back", champion):
        rollback = f", rolled back from {changes[-1].get('instead_of')} at {changes[-1]['at']}"
    yield holder(root)
    yield f"champion: {champion or 'none yet'}{rollback}"
    yield f"anchor: {versions.linked(folder, 'anchor') or 'none yet'}"
    if champion is not None:
        try:
            versions.find(folder, champion)
        except (MosaicError, OSError) as error:
            yield f"the champion cannot be served ({error}); restore versions/{champion}, or promote another version"
    if folder.hold.exists():
        yield "hold is on: nothing is promoted"
    for day in folder.days()[-days:]:
        state = day.state
        word = OUTCOMES[state.outcome][0].lower() if state.outcome is not None else day.phase
        more = state.reason if state.outcome is not None else last_step(day)
        yield f"{state.day}: {word}{f': {more}' if more else ''}"
    yield f"new data: {', '.join(new_dates(folder, recipe)) or 'none'}"
    if (opens := recipe.budget.opens(datetime.now(UTC))) is not None:
        yield f"the window opens at {utc_text(opens)}"
    for hook in hooks.pending(folder):
        yield f"hook {hook.command!r} is pending for version {hook.version} ({hook.tries} tries)"
