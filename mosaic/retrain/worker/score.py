"""Scores of versions: the champion's on today's rows, for the data check, and all of a day's, for the gate."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from mosaic.artifact import save
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.errors import MosaicError
from mosaic.retrain import versions
from mosaic.retrain.data_check import DayFigures, InputFigures, check_data, day_figures
from mosaic.retrain.folder import load_if_intact
from mosaic.retrain.gate import DayScores, ModelFacts, RowSet, Scores, joined
from mosaic.retrain.worker.data import Unreadable, check_unchanged, fresh_rows, frozen_rows, read_rows
from mosaic.retrain.worker.positions import seed_step
from mosaic.retrain.worker.work import Work

VALUE = "value"
"""The column that decides."""
MAX_ROWS = 5000
"""Most rows of a day to check, evenly spread."""


def score_versions(work: Work, trained: nn.Module | None, check_time: Callable[[], None]) -> None:
    """Writes ``facts.json`` and ``scores.json``; ``check_time`` raises after the end of the window.

    ``trained`` is None if the day resumes from its export, or other processes trained it.
    """
    check_unchanged(work)
    state = work.day.state
    rows: dict[RowSet, tuple[Any, ...]] = {"frozen": frozen_rows(work), "fresh": fresh_rows(work)}
    scores = []
    for name in dict.fromkeys(name for name in (state.version, state.champion, state.anchor) if name is not None):
        check_time()
        if name == state.version:
            model = _make_model(work, work.day.model)
            save(_facts(work, model, trained, rows["frozen"] or rows["fresh"]), work.day.facts)
        else:
            model = model_of(work, name)
        scores += [score_rows(work, model, name, kind, part) for kind, part in rows.items() if part]
    save(DayScores(scores=tuple(scores)), work.day.scores)


def model_of(work: Work, version: str | None) -> nn.Module:
    """Returns today's model with the weights of a version; parts without weights are untrained."""
    return _make_model(work, versions.find(work.folder, version).weights if version is not None else None, partial=True)


def _make_model(work: Work, weights: Path | None, *, partial: bool = False) -> nn.Module:
    seed_step(work.recipe.budget.seed, 0, 0)
    model = work.program.make_model().to(work.device)
    if weights is not None:
        Checkpointer(model).load_weights(weights, partial=partial)
    return model


def score_rows(work: Work, model: nn.Module, version: str, kind: RowSet, rows: Iterable[Any]) -> Scores:
    return Scores.of(version, kind, joined(_score_batches(work, model, rows)) or {VALUE: []})  # no row is readable


def _score_batches(work: Work, model: nn.Module, samples: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Scores samples batch by batch, in evaluation mode and without gradients; yields the results of ``score``."""
    collate, was_training = work.program.collate or default_collate, model.training
    remaining = iter(samples)
    model.eval()
    try:
        with torch.no_grad():
            while part := list(islice(remaining, work.recipe.budget.batch)):
                on_device = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(work.device), collate(part))
                columns = work.program.score(model, on_device)
                if not isinstance(columns, Mapping) or VALUE not in columns:
                    what = ", ".join(map(str, columns)) if isinstance(columns, Mapping) else type(columns).__name__
                    raise MosaicError(f"score returned {what}; return a dict of columns with 'value' among them")
                for name, column in columns.items():
                    with suppress(TypeError):  # of a number, which has no length
                        if len(column) == len(part):
                            continue
                    raise MosaicError(f"score: {name!r} is {column!r:.99}; return one for each of {len(part)} rows")
                yield columns
    finally:
        model.train(was_training)


def _facts(work: Work, exported: nn.Module, trained: nn.Module | None, rows: tuple[Any, ...]) -> ModelFacts:
    """Measures the facts that do not depend on other versions."""
    first = rows[: work.recipe.budget.batch]
    difference = None
    if trained is not None and first:
        values = [np.array(joined(_score_batches(work, model, first))[VALUE]) for model in (exported, trained)]
        difference = float(np.max(np.abs(values[0] - values[1])))
    state = exported.state_dict()
    return ModelFacts(
        invalid_tensors=tuple(name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())),
        export_difference=difference,
    )


# The check of new data.


def check_new_data(work: Work) -> None:
    """Writes ``figures.json`` and ``data_check.json``.

    The champion scores today's rows. Without one, new weights do, for labels and modalities only.
    """
    judged = [day for day in work.folder.days() if day.state.outcome in ("promoted", "held", "refused")]
    earlier = [load_if_intact(DayFigures, day.figures) for day in judged if day.path != work.day.path]
    before = tuple(figures for figures in earlier if figures is not None)
    today, frozen, state = _Measured(), _Measured(), work.day.state
    rows = today.rows_of(work, *(record.path for record in work.sources.of_kind("new")))
    figures = day_figures(
        state.day,
        score_rows(work, model_of(work, state.champion), state.champion or "none", "fresh", rows),
        unreadable=today.unreadable,
        inputs={name: _input(*sums) for name, sums in sorted(today.inputs.items())},
        is_champion=state.champion is not None,
        known={name for figures in before for name in figures.modalities},
    )
    save(figures, work.day.figures)
    for _ in frozen.rows_of(work, work.recipe.sources.frozen):
        pass
    check = check_data(figures, before, work.recipe.check, today_rows=today.digests, frozen_rows=frozen.digests)
    save(check, work.day.data_check)


class _Measured:
    def __init__(self) -> None:
        self.digests: set[str] = set()
        self.unreadable: Counter[str] = Counter()
        self.inputs: dict[str, list[float]] = {}

    def rows_of(self, work: Work, *folders: str) -> Iterator[Any]:
        """Yields the readable rows of data folders, without augmentation."""
        sets = [work.dataset(folder, train=False) for folder in folders]
        stride = max(1, math.ceil(sum(map(len, sets)) / MAX_ROWS))
        for data in sets:
            for sample in read_rows(data, range(0, len(data), stride), work.recipe.budget.seed):
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
                wide = values.astype(np.float64)
                added = wide.size, float(wide.sum()), float(np.square(wide).sum())
                sums = self.inputs.get(name, (0.0, 0.0, 0.0))
                self.inputs[name] = [before + more for before, more in zip(sums, added, strict=True)]
        self.digests.add(digest.hexdigest())


def _input(count: float, total: float, squares: float) -> InputFigures:
    mean, spread = total / count, math.sqrt(max(0.0, squares / count - (total / count) ** 2))
    finite = math.isfinite(mean) and math.isfinite(spread)
    return InputFigures(mean=mean if finite else None, spread=spread if finite else None)
