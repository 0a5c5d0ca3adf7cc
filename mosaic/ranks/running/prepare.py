"""Getting a model ready on this rank, before there is a plan: where it runs, its modules, and how they can be cut."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.backends.table import default_backend
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.signature import Arguments, Signature, learn
from mosaic.engine.finding.find import Finding, Sample, find_modules
from mosaic.errors import UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.find.structure import map_tensors
from mosaic.hardware.find import available_cores
from mosaic.profiler import Subject
from mosaic.ranks.calls.routed import Template
from mosaic.ranks.rows.batched import rows_of, with_batch
from mosaic.ranks.world.groups import check_place, own_gpu


def backend_for(model: nn.Module, backend: Backend | None, device: torch.device) -> Backend:
    """Returns where this rank runs, once its model is seen to be there."""
    if backend is None and device.type == "cuda":
        backend = default_backend(torch.device("cuda", own_gpu()))
        torch.cuda.set_device(backend.torch_device)
    backend = backend or HostBackend(cores=cores_of_rank())
    check_place(model, backend.torch_device)
    return backend


def cores_of_rank(rank: int | None = None, ranks: int | None = None) -> tuple[int, ...]:
    """Returns this rank's share of the cores of its machine: at least one, which ranks may then have in common."""
    cores = available_cores()
    rank = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    each = max(1, len(cores) // ranks)
    start = (rank * each) % len(cores)
    return cores[start : start + each]


def find_with_rows(
    model: nn.Module, sample: Sample, modules: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> tuple[Finding, dict[str, tuple[bool, ...]]]:
    """Returns the modules, and for each which of its arguments have a row for each sample.

    Modules that share something with others are no obstacle here.

    Raises:
        UnsupportedModelError: A module cannot be split over ranks.
    """
    finding = find_modules(model, sample, include=modules, exclude=exclude, may_share=True)
    finding = replace(finding, subjects=tuple(map(_cut, finding.subjects)))
    for subject in finding.subjects:
        _refuse(subject, (finding.local | finding.aside).get(subject.name))
    batched = {subject.name: rows_of(subject) for subject in finding.subjects}
    subjects = tuple(with_batch(subject, batched[subject.name]) for subject in finding.subjects)
    return replace(finding, subjects=subjects), batched


def _cut(subject: Subject) -> Subject:
    """Cuts a module's inputs from the graph of the sample's step, which holds on to the parameters of others."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return replace(subject, args=map_tensors(cut, subject.args), kwargs=map_tensors(cut, subject.kwargs))


def _refuse(subject: Subject, obstacle: Obstacle | None) -> None:
    if obstacle is not None:
        raise UnsupportedModelError(
            f"{subject.name!r} cannot run on another rank than the one that calls it: {obstacle}; {obstacle.todo}. "
            f"colocate(..., exclude=[{subject.name!r}]) leaves it where it is called"
        )
    for path, part in subject.module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UnsupportedModelError(
                f"{subject.name}{'.' if path else ''}{path} is a {type(part).__name__}: its statistics would be those "
                "of another batch than without Mosaic; use GroupNorm or LayerNorm, or leave the module where it is "
                f"called: colocate(..., exclude=[{subject.name!r}])"
            )


def learn_call(model: nn.Module, subject: Subject) -> tuple[Template, Signature]:
    """Calls a module as in the sample's step; returns what it returns and what the call showed of it."""
    settings = subject.settings if subject.settings is not None else nullcontext
    with preserved(model, alone=(subject,)), torch.enable_grad(), settings():
        arguments = Arguments.take(subject.args, subject.kwargs)
        result, _, signature = learn(lambda: subject.module(*subject.args, **subject.kwargs), arguments, subject.module)
    return Template.of(result), signature
