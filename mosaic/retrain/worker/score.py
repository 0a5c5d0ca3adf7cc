"""Scores the challenger, the champion and the anchor on the same rows, for the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mosaic.artifact import save
from mosaic.checkpoint.methods import KeptModel
from mosaic.errors import MosaicError
from mosaic.retrain import versions
from mosaic.retrain.gate import DayScores, ModelFacts, RowSet, Scores, digest_of_rows, joined
from mosaic.retrain.worker.work import Work
from mosaic.train.data.samples import is_iterable
from mosaic.train.data.seeds import seed_step
from mosaic.train.data.sources import held_out_rows
from mosaic.train.pipelined import PipelinedScores
from mosaic.train.scoring import Scored, Unreadable, latency_ms, read_rows, score_batches
from mosaic.train.worker_group import WorkerGroup

Row = tuple[str, Any]
"""The name of a row, such as ``data/frozen:7``, and its sample."""


@contextmanager
def model_of(work: Work, weights: Path | None, group: WorkerGroup, *, partial: bool = True) -> Iterator[Scored]:
    """Constructs today's model for scoring; parts without weights are untrained."""
    budget = work.recipe.budget
    seed_step(budget.seed, 0, 0)
    model = work.program.make_model().to(group.device)
    if weights is not None:
        KeptModel(model).load_weights(weights, partial=partial)
    if not budget.pipeline:
        yield model
        return
    scores = PipelinedScores(
        model, work.program.score, micro_batches=budget.micro_batches, memory_bytes=budget.memory_bytes
    )
    try:
        yield scores
    finally:
        scores.remove()


def weights_of(work: Work, version: str | None) -> Path | None:
    return None if version is None else versions.find(work.folder, version).weights


def score_versions(work: Work, group: WorkerGroup, model: nn.Module | None, check_time: Callable[[], None]) -> None:
    """Writes ``facts.json`` and ``scores.json``.

    Args:
        work: The day.
        group: The ranks.
        model: The trained model; None if the day resumes from its export, or the model is divided.
        check_time: Raises after the end of the window.
    """
    state = work.day.state
    assert state.version is not None
    rows: dict[RowSet, tuple[Row, ...]] = {"frozen": frozen_rows(work), "fresh": tuple(_fresh_rows(work))}
    scores = []
    for name in dict.fromkeys(name for name in (state.version, state.champion, state.anchor) if name is not None):
        check_time()
        is_new = name == state.version
        weights = work.day.model if is_new else weights_of(work, name)
        with model_of(work, weights, group, partial=not is_new) as scored:
            if is_new:
                facts = _facts(work, group, scored, model, rows["frozen"] or rows["fresh"])
            scores += [score_rows(work, group, scored, name, kind, part) for kind, part in rows.items() if part]
    if group.rank == 0:
        save(facts, work.day.facts)
        save(DayScores(scores=tuple(scores)), work.day.scores)


def frozen_rows(work: Work) -> tuple[Row, ...]:
    return tuple(_rows(work, work.recipe.sources.frozen))


def score_rows(
    work: Work, group: WorkerGroup, model: Scored, version: str, kind: RowSet, rows: tuple[Row, ...]
) -> Scores:
    samples = (sample for _, sample in rows)
    columns = joined(score_batches(work.program, model, samples, batch=work.recipe.budget.batch, device=group.device))
    return Scores.of(version, kind, digest_of_rows(name for name, _ in rows), columns)


def _fresh_rows(work: Work) -> Iterator[Row]:
    """Yields the held-out rows of the day's new data."""
    sources = work.sources
    for record in sources.of_kind("new"):
        if not record.rows:  # iterable: no row is held out
            continue
        data = work.program.make_dataset(work.folder.path / record.path, False)
        out = held_out_rows(data, share=sources.fresh_share, seed=sources.seed, day=record.day)
        yield from _rows(work, record.path, tuple(np.flatnonzero(out).tolist()))


def _rows(work: Work, path: str, rows: tuple[int, ...] | None = None) -> Iterator[Row]:
    data = work.program.make_dataset(work.folder.path / path, False)
    if is_iterable(data):
        raise MosaicError(f"the rows of {path} have to be indexed; let make_dataset return a map-style Dataset for it")
    selected = tuple(range(len(data))) if rows is None else rows
    for row, sample in zip(selected, read_rows(data, selected, work.recipe.budget.seed), strict=True):
        if isinstance(sample, Unreadable):
            raise MosaicError(
                f"row {row} of {path} cannot be read ({sample.reason}), and versions are compared on it; mend it, or "
                "take it out of the folder"
            )
        yield f"{path}:{row}", sample


def _facts(
    work: Work, group: WorkerGroup, exported: Scored, model: nn.Module | None, rows: tuple[Row, ...]
) -> ModelFacts:
    """Measures the facts that do not depend on other versions."""
    first = [sample for _, sample in rows[: work.recipe.budget.batch]]
    plain = exported.model if isinstance(exported, PipelinedScores) else exported
    difference = None
    if model is not None and first:
        reloaded, original = (
            np.array(joined(score_batches(work.program, scored, first, batch=len(first), device=group.device))["value"])
            for scored in (exported, model)
        )
        difference = float(np.max(np.abs(reloaded - original)))
    return ModelFacts(
        invalid_tensors=tuple(
            name for name, tensor in plain.state_dict().items() if not bool(torch.isfinite(tensor).all())
        ),
        export_difference=difference,
        size_bytes=work.day.model.stat().st_size,
        latency_ms=latency_ms(work.program, exported, first[:1], group.device) if first else None,
    )
