"""What a module takes and makes in a step, in bytes: what travels where it runs on some of several ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mosaic.cost.communication.ranked import ModuleTraffic
from mosaic.profiler.measuring.batch import batch_of
from mosaic.profiler.subject import Subject, map_tensors, tensors_in


def traffic_of(subject: Subject, *, batch: int | None = None) -> ModuleTraffic:
    """Runs a module's forward once and returns the bytes of its arguments, results and gradients, for its whole batch.

    Args:
        subject: The module with its inputs.
        batch: Samples, where its arguments do not tell: those with another leading dimension are no part of the batch.

    Raises:
        UnsupportedModelError: Its arguments have no batch in common.
    """
    batch = batch_of(subject, "split over ranks") if batch is None else batch
    given = [t for t in tensors_in((subject.args, subject.kwargs)) if t.dim() > 0 and len(t) == batch]
    args, kwargs = map_tensors(_cut, (subject.args, subject.kwargs))
    with torch.enable_grad():
        if subject.settings is None:
            made = list(tensors_in(subject.module(*args, **kwargs)))
        else:
            with subject.settings():
                made = list(tensors_in(subject.module(*args, **kwargs)))
    return ModuleTraffic(
        arguments=_nbytes(given),
        results=_nbytes(made),
        argument_gradients=_nbytes(t for t in given if t.requires_grad),
        result_gradients=_nbytes(t for t in made if t.requires_grad),
        parameter_gradients=subject.gradient_bytes,
    )


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
