"""The day's data before training: freezes the list of it, measures it, and checks it against earlier days."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mosaic.artifact import save
from mosaic.errors import MosaicError
from mosaic.retrain.data_check import DayFigures, InputFigures, check_data, day_figures
from mosaic.retrain.folder import load_if_intact
from mosaic.retrain.worker.loader import is_iterable
from mosaic.retrain.worker.positions import replayed_share, samples_of
from mosaic.retrain.worker.score import Unreadable, model_of, read_rows, score_rows
from mosaic.retrain.worker.sources import Kind, SourceRecord, Sources, held_out_rows, record_of
from mosaic.retrain.worker.work import Work

MAX_ROWS = 5000
"""Most rows of a day to check, evenly spread."""


def freeze(work: Work) -> None:
    """Writes ``sources.json``: folders, sizes, digests, rows, shares, and the steps of the day.

    Raises:
        MosaicError: A folder is missing, empty, changed since a day trained on it, or has no rows to train on.
    """
    recipe, budget, state = work.recipe, work.recipe.budget, work.day.state
    known: dict[str, SourceRecord] = {}
    for day in work.folder.days():
        earlier = load_if_intact(Sources, day.sources) if day.path != work.day.path else None
        if earlier is not None:
            known |= {record.path: record for record in (*earlier.sources, earlier.frozen)}
    records = [_counted(work, day, "new", known) for day in state.new]
    records += [_counted(work, day, "replay", known) for day in state.replay]
    new, replay = ({r.name: r.trained for r in records if r.kind == kind} for kind in ("new", "replay"))
    num_steps, share = budget.steps, recipe.sources.replay.share
    if records[0].samples:  # an iterable data set, the day's only one
        assert num_steps is not None
        samples = {records[0].name: num_steps * budget.batch}
    elif sum(new.values()):
        if num_steps is None:
            new_share = 1 - replayed_share(new, replay, share)
            num_steps = max(1, math.ceil(sum(new.values()) * budget.passes / (budget.batch * new_share)))
        samples = samples_of(new, replay, share, num_steps * budget.batch)
    else:
        rows = sum(record.rows for record in records if record.kind == "new")
        raise MosaicError(
            f"no row of {', '.join(state.new)} is left to train on ({rows} rows, fresh_share = "
            f"{recipe.sources.fresh_share:g}); wait for more data, or lower fresh_share"
        )
    frozen = work.folder.path / recipe.sources.frozen
    sources = Sources(
        day=state.day,
        seed=budget.seed,
        fresh_share=recipe.sources.fresh_share,
        batch=budget.batch,
        num_steps=num_steps,
        sources=tuple(replace(record, samples=samples.get(record.name, 0)) for record in records),
        frozen=record_of(work.folder.path, frozen, kind="frozen", day="", known=known),
    )
    save(sources, work.day.sources)


def _counted(work: Work, day: str, kind: Kind, known: dict[str, SourceRecord]) -> SourceRecord:
    """Lists a day's data folder and counts its rows; the record of an iterable data set has a sample and no rows."""
    path = work.folder.path / work.recipe.sources.new.path.replace("{day}", day)
    record = record_of(work.folder.path, path, kind=kind, day=day, known=known)
    data = work.program.make_dataset(path, True)
    if is_iterable(data):
        _check_iterable(work, data, kind)
        return replace(record, rows=0, trained=0, samples=1)
    out = held_out_rows(data, share=work.recipe.sources.fresh_share, seed=work.recipe.budget.seed, day=day)
    return replace(record, rows=len(data), trained=len(data) - int(out.sum()))


def _check_iterable(work: Work, data: Any, kind: Kind) -> None:
    """Raises MosaicError for settings that an iterable data set does not support."""
    recipe = work.recipe
    wrong = {
        "[budget] steps has to say how many": recipe.budget.steps is None,
        "[sources] fresh_share has to be 0": recipe.sources.fresh_share > 0,
        "[sources] replay has to be { share = 0 }": recipe.sources.replay.share > 0 or kind != "new",
        "one day at a time can be trained on": len(work.day.state.new) > 1,
    }
    if broken := [rule for rule, is_broken in wrong.items() if is_broken]:
        raise MosaicError(
            f"make_dataset returned a {type(data).__name__}, which can only be gone through: {'; '.join(broken)}; or "
            "return a map-style Dataset, which has len() and can be indexed"
        )


def check_new_data(work: Work) -> None:
    """Writes ``figures.json`` and ``data_check.json``.

    The champion scores today's rows. Without one, new weights do, for labels and modalities only.
    """
    judged = [day for day in work.folder.days() if day.state.outcome in ("promoted", "held", "refused")]
    earlier = [load_if_intact(DayFigures, day.figures) for day in judged if day.path != work.day.path]
    before = tuple(figures for figures in earlier if figures is not None)
    today, frozen, state = _Measured(), _Measured(), work.day.state
    rows = today.rows_of(work, [work.folder.path / record.path for record in work.sources.of_kind("new")])
    figures = day_figures(
        state.day,
        score_rows(work, model_of(work, state.champion), state.champion or "none", "fresh", rows),
        unreadable=today.unreadable,
        inputs={name: _input(*sums) for name, sums in sorted(today.inputs.items())},
        is_champion=state.champion is not None,
        known={name for figures in before for name in figures.modalities},
    )
    save(figures, work.day.figures)
    for _ in frozen.rows_of(work, [work.folder.path / work.recipe.sources.frozen]):
        pass
    check = check_data(figures, before, work.recipe.check, today_rows=today.digests, frozen_rows=frozen.digests)
    save(check, work.day.data_check)


class _Measured:
    """Figures of the samples so far."""

    def __init__(self) -> None:
        self.digests: set[str] = set()
        self.unreadable: Counter[str] = Counter()
        self.inputs: dict[str, list[float]] = {}

    def rows_of(self, work: Work, folders: list[Path]) -> Iterator[Any]:
        """Yields the readable rows of data folders, without augmentation."""
        sets = [work.program.make_dataset(folder, False) for folder in folders]
        total = sum(0 if is_iterable(data) else len(data) for data in sets)
        stride = max(1, math.ceil(total / MAX_ROWS))
        for data in sets:
            rows = range(0, MAX_ROWS if is_iterable(data) else len(data), stride)
            for sample in read_rows(data, rows, work.recipe.budget.seed):
                if isinstance(sample, Unreadable):
                    self.unreadable[sample.reason] += 1
                else:
                    self._add(sample)
                    yield sample

    def _add(self, sample: Any) -> None:
        digest = hashlib.sha256()
        for path, leaf in pytree.tree_flatten_with_path(sample)[0]:
            values = leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf
            if not isinstance(values, np.ndarray) or not values.ndim:
                continue
            digest.update(f"{pytree.keystr(path)} {values.dtype} {values.shape}".encode() + values.tobytes())
            if values.dtype.kind == "f" and values.any():  # zeros mark a modality that the row lacks
                name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) or "sample"
                sums = self.inputs.setdefault(name, [0.0, 0.0, 0.0])
                wide = values.astype(np.float64)
                sums[0] += wide.size
                sums[1] += float(wide.sum())
                sums[2] += float(np.square(wide).sum())
        self.digests.add(digest.hexdigest())


def _input(count: float, total: float, squares: float) -> InputFigures:
    mean, spread = total / count, math.sqrt(max(0.0, squares / count - (total / count) ** 2))
    finite = math.isfinite(mean) and math.isfinite(spread)
    return InputFigures(mean=mean if finite else None, spread=spread if finite else None)
