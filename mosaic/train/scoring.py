"""A model's scores on rows in a fixed order, for the gate and for the check of a day's data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from mosaic.errors import MosaicError
from mosaic.train.data.samples import is_iterable
from mosaic.train.data.seeds import drawn_under, generators_of
from mosaic.train.pipelined import PipelinedScores
from mosaic.train.program import Program

VALUE = "value"
"""The column that decides."""
_REPEATS = 5
Scored = nn.Module | PipelinedScores
"""A model on one device or over ranks."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    reason: str
    """Kind and message of the error."""


def read_rows(data: Any, rows: Iterable[int], seed: int) -> Iterator[Any]:
    """Yields rows of a data set, or ``Unreadable``; (seed, i) seeds row i, so it is always the same.

    An iterable data set yields as many rows from its beginning as it has.
    """
    generators = generators_of(data)
    one_by_one = iter(data) if is_iterable(data) else None
    for row in rows:
        with drawn_under(seed, row, generators):
            try:
                sample = data[row] if one_by_one is None else next(one_by_one)
            except StopIteration:
                return
            except MemoryError:
                raise
            except Exception as error:  # of any kind, from the user's data set: the caller counts it, or raises
                sample = Unreadable(f"{type(error).__name__}: {error}")
        yield sample


def score_batches(
    program: Program, model: Scored, samples: Iterable[Any], *, batch: int, device: torch.device
) -> Iterator[Mapping[str, Any]]:
    """Scores samples batch by batch, in evaluation mode and without gradients; ranks cut a batch into micro-batches.

    Yields the result of ``score`` for each batch or micro-batch.

    Raises:
        MosaicError: The result of ``score`` is not a dict of columns with one entry per row.
    """
    collate = program.collate or default_collate
    plain = model.model if isinstance(model, PipelinedScores) else model
    rows = -(-batch // model.micro_batches) if isinstance(model, PipelinedScores) else batch
    was_training = plain.training
    plain.eval()
    remaining = iter(samples)
    try:
        with torch.no_grad():
            while part := list(islice(remaining, batch)):
                parts = [part[first : first + rows] for first in range(0, len(part), rows)]
                batches = [moved(collate(chunk), device) for chunk in parts]
                if isinstance(model, PipelinedScores):
                    scored: Iterable[Any] = model.scores(batches)
                else:
                    scored = [program.score(model, part) for part in batches]
                for columns, chunk in zip(scored, parts, strict=True):
                    _check(columns, len(chunk))
                    yield columns
    finally:
        plain.train(was_training)


def latency_ms(program: Program, model: Scored, samples: list[Any], device: torch.device) -> float:
    """Measures the time to score samples in one batch, in ms: the fastest of a few repeats."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for columns in score_batches(program, model, samples, batch=len(samples), device=device):
            torch.as_tensor(columns[VALUE]).cpu()
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def moved(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def _check(columns: Any, count: int) -> None:
    if not isinstance(columns, Mapping) or VALUE not in columns:
        raise MosaicError(f"score returned {type(columns).__name__}; return a dict of columns with 'value' among them")
    for name, column in columns.items():
        if len(column) != count:
            raise MosaicError(f"score returned {len(column)} entries of {name!r} for {count} rows; return one a row")
