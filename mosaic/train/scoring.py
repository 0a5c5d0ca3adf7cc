"""A model's scores on rows in a fixed order: what the gate compares, and what a day's data is looked at by."""

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
"""A model that is scored, on one device or over ranks."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a row that could not be read."""

    reason: str
    """Kind of the error, and what it said."""


def read_rows(data: Any, rows: Iterable[int], seed: int) -> Iterator[Any]:
    """Yields rows of a data set, or ``Unreadable``; row i is read under (seed, i), so that it is always the same.

    Of one that can only be gone through, as many from its beginning as there are.
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
    """Scores samples one batch after the other, in evaluation mode and without gradients.

    Args:
        program: The user's functions.
        model: The model; its mode is put back.
        samples: In order; those of a batch that is scored over ranks are cut into micro-batches.
        batch: Samples of a batch.
        device: Where the model is.

    Yields:
        What ``score`` returned for each batch or micro-batch.

    Raises:
        MosaicError: ``score`` returns no columns with one entry a row.
    """
    collate = program.collate or default_collate
    plain = model.model if isinstance(model, PipelinedScores) else model
    rows = -(-batch // model.micro_batches) if isinstance(model, PipelinedScores) else batch
    was_training = plain.training
    plain.eval()
    rest = iter(samples)
    try:
        with torch.no_grad():
            while part := list(islice(rest, batch)):
                parts = [part[first : first + rows] for first in range(0, len(part), rows)]
                batches = [moved(collate(one), device) for one in parts]
                if isinstance(model, PipelinedScores):
                    scored: Iterable[Any] = model.scores(batches)
                else:
                    scored = [program.score(model, one) for one in batches]
                for found, one in zip(scored, parts, strict=True):
                    _check(found, len(one))
                    yield found
    finally:
        plain.train(was_training)


def latency_ms(program: Program, model: Scored, samples: list[Any], device: torch.device) -> float:
    """Measures how long a model takes to score samples together, in ms: the fastest of a few times."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for found in score_batches(program, model, samples, batch=len(samples), device=device):
            torch.as_tensor(found[VALUE]).cpu()
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def _check(found: Any, count: int) -> None:
    if not isinstance(found, Mapping) or VALUE not in found:
        raise MosaicError(f"score returned {type(found).__name__}; return a dict of columns with 'value' among them")
    for name, column in found.items():
        if len(column) != count:
            raise MosaicError(f"score returned {len(column)} entries of {name!r} for {count} rows; return one a row")
