"""A module's share of a batch: what it runs as one of several data-parallel replicas."""

from __future__ import annotations

import dataclasses

import torch

from mosaic.errors import UnsupportedModelError
from mosaic.profiler.subject import Subject, map_tensors, tensors_in


def split_batch(subject: Subject, degree: int) -> Subject:
    """Returns a module with the inputs of one of ``degree`` replicas: ceil(B/d) of the B samples.

    The batch is the leading dimension of all its tensors. One of size 1 where others have more is taken to
    be broadcast, and scalars have none; both stay as they are.

    Raises:
        UnsupportedModelError: The tensors share no leading dimension, or there are fewer samples than replicas.
    """
    if degree == 1:
        return subject
    batch = batch_of(subject, f"split over {degree} devices")
    if batch < degree:
        raise UnsupportedModelError(
            f"{subject.name!r} has a batch of {batch}, which is less than one sample for each of {degree} devices"
        )
    share = -(-batch // degree)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or len(tensor) != batch:
            return tensor
        return tensor.detach()[:share].clone().requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(cut, subject.args), map_tensors(cut, subject.kwargs)
    return dataclasses.replace(subject, args=args, kwargs=kwargs, batch=subject.batch and share)


def repeat_batch(subject: Subject, times: int) -> Subject:
    """Returns a module with inputs of ``times`` as many samples: those of all ranks, where each holds as many.

    Raises:
        UnsupportedModelError: The tensors share no leading dimension.
    """
    if times == 1:
        return subject
    batch = batch_of(subject, f"repeated {times} times")

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or len(tensor) != batch:
            return tensor
        return tensor.detach().repeat(times, *[1] * (tensor.dim() - 1)).requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(repeat, subject.args), map_tensors(repeat, subject.kwargs)
    return dataclasses.replace(subject, args=args, kwargs=kwargs, batch=subject.batch and times * batch)


def batch_of(subject: Subject, what: str) -> int:
    """Returns the samples of a module's batch: the leading dimension that its tensors have in common.

    Raises:
        UnsupportedModelError: There is none; says that the module cannot be ``what``.
    """
    if subject.batch is not None:
        return subject.batch
    sizes = {len(tensor) for tensor in tensors_in((subject.args, subject.kwargs)) if tensor.dim() > 0}
    wide = sizes - {1} or sizes
    if len(wide) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in((subject.args, subject.kwargs))) or "no tensors"
        raise UnsupportedModelError(
            f"{subject.name!r} cannot be {what}: its inputs ({shapes}) share no leading "
            "dimension that is the batch; profile it at degree 1"
        )
    (batch,) = wide
    return batch
