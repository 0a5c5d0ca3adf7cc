"""Freezing a day's list of data before its first step."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from mosaic.artifact import save
from mosaic.errors import MosaicError
from mosaic.retrain.folder import load_of_earlier_day
from mosaic.retrain.working.work import Work
from mosaic.train.data.positions import CYCLE, shares_of
from mosaic.train.data.samples import is_iterable
from mosaic.train.data.sources import Kind, SourceRecord, Sources, held_out_rows, planned_steps, record_of


def freeze(work: Work) -> None:
    """Writes ``sources.json``: folders, sizes, digests, rows, shares, and the steps of the day.

    Raises:
        MosaicError: A folder is missing, empty, changed since a day trained on it, or has no rows to train on.
    """
    recipe, state = work.recipe, work.day.state
    known = _known(work)
    counted = [_counted(work, day, "new", known) for day in state.new]
    counted += [_counted(work, day, "replay", known) for day in state.replay]
    records = [record for record, _ in counted]
    new, replay = ({r.name: r.trained for r in records if r.kind == kind} for kind in ("new", "replay"))
    if any(goes_through for _, goes_through in counted):
        shares = {records[0].name: Fraction(1)}
    elif sum(new.values()):
        shares = shares_of(new, replay, recipe.sources.replay.share)
    else:
        rows = sum(record.rows for record in records if record.kind == "new")
        raise MosaicError(
            f"no row of {', '.join(state.new)} is left to train on ({rows} rows, fresh_share = "
            f"{recipe.sources.fresh_share:g}); wait for more data, or lower fresh_share"
        )
    new_share = sum(share for name, share in shares.items() if name in new)
    frozen = recipe.sources.frozen
    save(
        Sources(
            day=state.day,
            seed=recipe.budget.seed,
            fresh_share=recipe.sources.fresh_share,
            batch=recipe.budget.batch,
            num_steps=planned_steps(
                sum(new.values()),
                passes=recipe.budget.passes,
                steps=recipe.budget.steps,
                batch=recipe.budget.batch,
                new_share=float(new_share),
            ),
            sources=tuple(replace(record, units=int(shares.get(record.name, 0) * CYCLE)) for record in records),
            frozen=record_of(work.folder.path, work.folder.path / frozen, kind="frozen", day="", known=known),
        ),
        work.day.sources,
    )


def _counted(work: Work, day: str, kind: Kind, known: dict[str, SourceRecord]) -> tuple[SourceRecord, bool]:
    """Lists a day's data folder and counts its rows; returns the record, and True for an iterable data set."""
    path = work.folder.path / work.recipe.sources.new.path.replace("{day}", day)
    record = record_of(work.folder.path, path, kind=kind, day=day, known=known)
    data = work.program.make_dataset(path, True)
    if is_iterable(data):
        _check_iterable(work, data, kind)
        return replace(record, rows=0, trained=0), True
    out = held_out_rows(data, share=work.recipe.sources.fresh_share, seed=work.recipe.budget.seed, day=day)
    return replace(record, rows=len(data), trained=len(data) - int(out.sum())), False


def _check_iterable(work: Work, data: Any, kind: Kind) -> None:
    """Raises MosaicError for settings that an iterable data set does not support."""
    recipe, state = work.recipe, work.day.state
    wrong = {
        "[budget] steps has to say how many": recipe.budget.steps is None,
        "[sources] fresh_share has to be 0": recipe.sources.fresh_share > 0,
        "[sources] replay has to be { share = 0 }": recipe.sources.replay.share > 0 or kind != "new",
        "one day at a time can be trained on": len(state.new) > 1,
    }
    broken = [rule for rule, is_broken in wrong.items() if is_broken]
    if broken:
        raise MosaicError(
            f"make_dataset returned a {type(data).__name__}, which can only be gone through: {'; '.join(broken)}; or "
            "return a map-style Dataset, which has len() and can be indexed"
        )


def _known(work: Work) -> dict[str, SourceRecord]:
    """Returns the records of earlier days' folders, by path."""
    records: dict[str, SourceRecord] = {}
    for day in work.folder.days():
        sources = load_of_earlier_day(Sources, day.sources) if day.path != work.day.path else None
        if sources is not None:
            records |= {record.path: record for record in (*sources.sources, sources.frozen)}
    return records
