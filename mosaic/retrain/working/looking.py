"""The look at a day's data before training: its figures, the champion's error on it, and the check."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mosaic.artifact import save
from mosaic.retrain.folder import load_of_earlier_day
from mosaic.retrain.frozen import frozen_rows
from mosaic.retrain.gate import Scores, joined
from mosaic.retrain.intake.data_check import check_data
from mosaic.retrain.intake.usual import DayFigures, InputFigures, day_figures
from mosaic.retrain.working.judging import model_of, weights_of
from mosaic.retrain.working.work import Work
from mosaic.train.data.samples import is_iterable
from mosaic.train.scoring import Unreadable, read_rows, score_batches
from mosaic.train.worker_group import WorkerGroup

MAX_LOOKED = 5000
"""Most rows of a day to check, evenly spread."""


def look(work: Work, group: WorkerGroup) -> None:
    """Writes ``figures.json`` and ``data_check.json``."""
    judged = [day for day in work.folder.days() if day.state.outcome in ("promoted", "held", "refused")]
    earlier = [load_of_earlier_day(DayFigures, day.figures) for day in judged if day.path != work.day.path]
    before = tuple(figures for figures in earlier if figures is not None)
    seen = _Seen()
    paths = [work.folder.path / record.path for record in work.sources.of_kind("new")]
    columns = joined(_scored(work, group, seen.rows_of(work, paths)))
    group.first_does(lambda: _write(work, seen, columns, before))


def _write(work: Work, seen: _Seen, columns: dict[str, list[Any]], before: tuple[DayFigures, ...]) -> None:
    figures = _figures(work, seen, columns, before)
    save(figures, work.day.figures)
    frozen = _Seen()
    parts = frozen_rows(work.folder, work.recipe.sources.frozen).parts
    for _ in frozen.rows_of(work, [work.folder.path / part.path for part in parts if not part.added]):
        pass
    check = check_data(figures, before, work.recipe.check, today_rows=seen.digests, frozen_rows=frozen.digests)
    save(check, work.day.data_check)


class _Seen:
    """Figures of the samples so far."""

    def __init__(self) -> None:
        self.digests: set[str] = set()
        self.unreadable: Counter[str] = Counter()
        self.inputs: dict[str, list[float]] = {}

    def rows_of(self, work: Work, folders: list[Path]) -> Iterator[Any]:
        """Yields the readable rows of data folders, without augmentation."""
        sets = [work.program.make_dataset(folder, False) for folder in folders]
        total = sum(0 if is_iterable(data) else len(data) for data in sets)
        stride = max(1, math.ceil(total / MAX_LOOKED))
        for data in sets:
            rows = range(0, MAX_LOOKED if is_iterable(data) else len(data), stride)
            for sample in read_rows(data, rows, work.recipe.budget.seed):
                if isinstance(sample, Unreadable):
                    self.unreadable[sample.reason] += 1
                    continue
                self._note(sample)
                yield sample

    def _note(self, sample: Any) -> None:
        digest = hashlib.sha256()
        for path, leaf in pytree.tree_flatten_with_path(sample)[0]:
            values = leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf
            if not isinstance(values, np.ndarray) or not values.ndim:
                continue
            digest.update(f"{pytree.keystr(path)} {values.dtype} {values.shape}".encode() + values.tobytes())
            if values.dtype.kind == "f" and values.any():  # zeros mark a modality that the row lacks
                sums = self.inputs.setdefault(_name(path), [0.0, 0.0, 0.0])
                wide = values.astype(np.float64)
                sums[0] += wide.size
                sums[1] += float(wide.sum())
                sums[2] += float(np.square(wide).sum())
        self.digests.add(digest.hexdigest())


def _name(path: tuple[Any, ...]) -> str:
    """Names an input, such as ``inputs.audio``."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) or "sample"


def _scored(work: Work, group: WorkerGroup, rows: Iterator[Any]) -> Iterator[Any]:
    """Scores today's rows by the champion; without one by new weights, for labels and modalities only."""
    with model_of(work, weights_of(work, work.day.state.champion), group) as model:
        yield from score_batches(work.program, model, rows, batch=work.recipe.budget.batch, device=group.device)


def _figures(work: Work, seen: _Seen, columns: dict[str, list[Any]], before: tuple[DayFigures, ...]) -> DayFigures:
    """Counts the day's rows; the champion's error leaves out modalities that no day had before."""
    champion = work.day.state.champion
    inputs = {name: _input(*sums) for name, sums in sorted(seen.inputs.items())}

    def figures(of: dict[str, list[Any]]) -> DayFigures:
        scores = Scores.of(champion or "none", "fresh", "", of or {"value": []})  # no row is readable
        day = work.day.state.day
        return day_figures(day, scores, unreadable=seen.unreadable, inputs=inputs, is_champion=champion is not None)

    whole, known = figures(columns), {name for day in before for name in day.modalities}
    if not known or "modality" not in columns:
        return whole
    met = [set(str(names).split("+")) <= known for names in columns["modality"]]
    some = figures({name: list(compress(column, met)) for name, column in columns.items()})
    return replace(whole, champion=some.champion, champion_error=some.champion_error)


def _input(count: float, total: float, squares: float) -> InputFigures:
    mean, spread = total / count, math.sqrt(max(0.0, squares / count - (total / count) ** 2))
    finite = math.isfinite(mean) and math.isfinite(spread)
    return InputFigures(mean=mean if finite else None, spread=spread if finite else None)
