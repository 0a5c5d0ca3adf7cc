"""A model's scores on rows in a fixed order: what the gate compares, and what a day's data is looked at by."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from mosaic.errors import MosaicError
from mosaic.train.program import Program
from mosaic.train.seeds import drawn_under

VALUE = "value"


def score_batches(
    program: Program, model: nn.Module, data: Any, rows: Sequence[int], *, batch: int, device: torch.device, seed: int
) -> Iterator[Mapping[str, Any]]:
    """Scores rows one batch after the other, in evaluation mode and without gradients.

    Args:
        program: The user's functions.
        model: The model; its mode is put back.
        data: The data set, without augmentation.
        rows: Indices into it.
        batch: Rows of a batch.
        device: Where the model is.
        seed: Row i is read under (seed, i), so that it is the same for every model.

    Yields:
        What ``score`` returned for each batch.

    Raises:
        MosaicError: ``score`` returns no columns with one entry a row, or a row cannot be read.
    """
    collate = program.collate or default_collate
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(rows), batch):
                part = rows[first : first + batch]
                found = program.score(model, moved(collate([_row(data, row, seed) for row in part]), device))
                _check(found, len(part))
                yield found
    finally:
        model.train(was_training)


def latency_ms(program: Program, model: nn.Module, batch: Any, *, repeats: int = 5) -> float:
    """Measures how long the model takes to score a batch, in ms: the fastest of a few times."""
    was_training = model.training
    model.eval()
    times = []
    try:
        with torch.no_grad():
            for _ in range(repeats):
                began = time.perf_counter()
                values = program.score(model, batch)[VALUE]
                torch.as_tensor(values).cpu()
                times.append((time.perf_counter() - began) * 1e3)
    finally:
        model.train(was_training)
    return min(times)


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def _row(data: Any, row: int, seed: int) -> Any:
    with drawn_under(seed, row):
        try:
            return data[row]
        except Exception as error:
            raise MosaicError(f"row {row} cannot be read: {type(error).__name__}: {error}") from error


def _check(found: Any, count: int) -> None:
    if not isinstance(found, Mapping) or VALUE not in found:
        raise MosaicError(f"score returned {type(found).__name__}; return a dict of columns with 'value' among them")
    for name, column in found.items():
        if len(column) != count:
            raise MosaicError(f"score returned {len(column)} entries of {name!r} for {count} rows; return one a row")
