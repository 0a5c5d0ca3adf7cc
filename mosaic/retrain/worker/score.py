"""Scores the challenger, the champion and the anchor on the same rows, for the gate. One process has the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from mosaic.retrain.gate import DayScores, ModelFacts, RowSet, Scores, joined
from mosaic.retrain.worker.loader import is_iterable
from mosaic.retrain.worker.seeds import drawn_under, generators_of, seed_step
from mosaic.retrain.worker.sources import held_out_rows
from mosaic.retrain.worker.work import Work

VALUE = "value"
"""The column that decides."""
_REPEATS = 5


def score_versions(work: Work, trained: nn.Module | None, check_time: Callable[[], None]) -> None:
    """Writes ``facts.json`` and ``scores.json``.

    Args:
        work: The day.
        trained: The trained model; None if the day resumes from its export, or other processes trained it.
        check_time: Raises after the end of the window.
    """
    state = work.day.state
    rows: dict[RowSet, tuple[Any, ...]] = {"frozen": frozen_rows(work), "fresh": tuple(_fresh_rows(work))}
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
    return Scores.of(version, kind, joined(score_batches(work, model, rows)) or {VALUE: []})  # no row is readable


def score_batches(work: Work, model: nn.Module, samples: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Scores samples batch by batch, in evaluation mode and without gradients; yields the results of ``score``.

    Raises:
        MosaicError: The result of ``score`` is not a dict of columns with one entry per row.
    """
    collate, was_training = work.program.collate or default_collate, model.training
    remaining = iter(samples)
    model.eval()
    try:
        with torch.no_grad():
            while part := list(islice(remaining, work.recipe.budget.batch)):
                on_device = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(work.device), collate(part))
                columns = work.program.score(model, on_device)
                if not isinstance(columns, Mapping) or VALUE not in columns:
                    raise MosaicError(
                        f"score returned {type(columns).__name__}; return a dict of columns with 'value' among them"
                    )
                for name, column in columns.items():
                    if len(column) != len(part):
                        raise MosaicError(
                            f"score returned {len(column)} entries of {name!r} for {len(part)} rows; return one a row"
                        )
                yield columns
    finally:
        model.train(was_training)


def _facts(work: Work, exported: nn.Module, trained: nn.Module | None, rows: tuple[Any, ...]) -> ModelFacts:
    """Measures the facts that do not depend on other versions."""
    first = rows[: work.recipe.budget.batch]
    difference, times_ms = None, []
    if trained is not None and first:
        values = [np.array(joined(score_batches(work, model, first))[VALUE]) for model in (exported, trained)]
        difference = float(np.max(np.abs(values[0] - values[1])))
    for _ in range(_REPEATS if first else 0):
        began = time.perf_counter()
        for columns in score_batches(work, exported, first[:1]):
            torch.as_tensor(columns[VALUE]).cpu()
        times_ms.append((time.perf_counter() - began) * 1e3)
    state = exported.state_dict()
    return ModelFacts(
        invalid_tensors=tuple(name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())),
        export_difference=difference,
        size_bytes=work.day.model.stat().st_size,
        latency_ms=min(times_ms, default=None),
    )


# Rows.


@dataclass(frozen=True, slots=True)
class Unreadable:
    reason: str
    """Kind and message of the error."""


def read_rows(data: Any, rows: Iterable[int], seed: int) -> Iterator[Any]:
    """Yields rows of a data set, or ``Unreadable``; (seed, i) seeds row i, so it is always the same.

    An iterable data set yields as many rows from its beginning as it has.
    """
    generators = generators_of(data)
    iterator = iter(data) if is_iterable(data) else None
    for row in rows:
        with drawn_under(seed, row, generators):
            try:
                sample = data[row] if iterator is None else next(iterator)
            except StopIteration:
                return
            except MemoryError:
                raise
            except Exception as error:  # of any kind, from the user's data set: the caller counts it, or raises
                sample = Unreadable(f"{type(error).__name__}: {error}")
        yield sample


def frozen_rows(work: Work) -> tuple[Any, ...]:
    return tuple(_rows(work, work.recipe.sources.frozen))


def _fresh_rows(work: Work) -> Iterator[Any]:
    """Yields the held-out rows of the day's new data."""
    sources = work.sources
    for record in sources.of_kind("new"):
        if record.rows:  # an iterable data set has no held-out rows
            data = work.program.make_dataset(work.folder.path / record.path, False)
            is_out = held_out_rows(data, share=sources.fresh_share, seed=sources.seed, day=record.day)
            yield from _rows(work, record.path, np.flatnonzero(is_out).tolist())


def _rows(work: Work, path: str, rows: list[int] | None = None) -> Iterator[Any]:
    data = work.program.make_dataset(work.folder.path / path, False)
    if is_iterable(data):
        raise MosaicError(f"the rows of {path} have to be indexed; let make_dataset return a map-style Dataset for it")
    selected = list(range(len(data))) if rows is None else rows
    for row, sample in zip(selected, read_rows(data, selected, work.recipe.budget.seed), strict=True):
        if isinstance(sample, Unreadable):
            raise MosaicError(
                f"row {row} of {path} cannot be read ({sample.reason}), and versions are compared on it; mend it, or "
                "take it out of the folder"
            )
        yield sample
