"""``mosaic.colocate``: one call before the loop, on one rank or on many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.artifact import load_as
from mosaic.backends.base import Backend
from mosaic.backends.table import open_backend
from mosaic.engine.finding.find import Sample
from mosaic.engine.handle import Handle
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.engine.session import MIN_GAIN, Request, Session, backend_for, names_of
from mosaic.errors import UnstableMeasurementError
from mosaic.plan import Plan
from mosaic.profiler import ProfileCache, open_cache
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.world.world import World


def colocate(
    model: nn.Module,
    sample: Sample,
    *,
    plan: Plan | str | Path | None = None,
    modules: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    backend: Backend | str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Handle:
    """Runs the modules of a model side by side, in its unchanged training loop.

    Finds the modules that can be placed by one run on ``sample``, profiles them, solves for stages and quotas unless
    ``plan`` is passed, and opens the lanes. The results of ``model(...)`` and ``loss.backward()`` do not change: on the
    host backend they are equal bit for bit at equal thread counts.

    In the first steps of the loop's optimizer (at most 120, ``TrialSettings``) the plain loop and at most three plans
    take turns; plans whose losses or gradients on the sample differ from the plain loop's are rejected. Then the
    fastest plan runs if it is faster beyond the noise. A passed plan runs without a trial. On the host a trial uses the
    plans' thread counts, so two runs agree bit for bit only with ``trial=None`` and one plan, or at one thread.

    Under torchrun every rank calls it with its own batch: see ``colocate_ranks``.

    Args:
        model: The model in training mode, on the backend's device. The classes of placed modules are swapped, as in
            FSDP2; parameters, keys and references do not change.
        sample: One training batch (of this rank): a dict of keyword arguments, a sequence of positional arguments, a
            tensor, or a function that runs the model once.
        plan: A plan or its file, to run instead of solving for one; its device i is rank i.
        modules: Names or patterns of the modules to place, such as ``"trunks.*"``; by default found by tracing.
        exclude: Names or patterns of modules not to place.
        backend: A backend or its name (``"cuda"``, ``"cuda:1"``, ``"host"``); by default the GPU of the model's
            parameters, or the host (of several ranks, this rank's share of its cores).
        options: Settings of planning, measuring and running.

    Raises:
        UnsupportedModelError: No module can be placed or, on several ranks, split over ranks.
        InvalidPlanError, InvalidProfileError: The file is for another model, device or number of ranks, or ranks
            differ.
        UnstableMeasurementError: Other processes used the CPU, and ``options.profiling`` is strict.
        BackendUnavailableError: The backend cannot run the model's device, or ranks differ in device or versions.
        RankFailedError: Another rank has failed; has its number.
        ValueError, TypeError: An argument is wrong or contradicts another, or the model is already colocated.
    """
    arguments: dict[str, Any] = {
        "sample": sample,
        "plan": load_as(Plan, plan),
        "modules": names_of(modules),
        "exclude": names_of(exclude) or (),
        "options": options,
    }
    backend = None if backend is None else open_backend(backend)
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r} is a {type(options).__name__}; pass mosaic.Options(...)")
    if World.is_there():
        return colocate_ranks(model, backend=backend, **arguments)
    backend = options.backend_of(backend or backend_for(model))
    prepare = partial(_prepare, model, open_cache(options.cache))
    return Handle(prepare(Request(backend=backend, **arguments)), prepare)


def _prepare(model: nn.Module, cache: ProfileCache, request: Request) -> Session:
    """Runs the steps of a session, also for ``handle.replan``."""
    request.options.check_for_one_rank(request.backend.device.kind)
    session = Session(model=model, request=request)
    with session.timed("find"):
        session.find()
    try:
        with session.timed("profile"):
            session.measure(cache)
        with session.timed("solve"):
            session.solve()
        if session.gains:
            with session.timed("open"):
                session.open()
        else:
            session.leave_alone(
                f"the best plan is predicted to be {session.plan.predicted_speedup:.3f} times as fast as one module "
                f"after the other; below {MIN_GAIN} the model is left as it was"
            )
    except (UnstableMeasurementError, torch.OutOfMemoryError) as error:
        failure = "there was no memory to run modules on lanes" if session.plans else "the modules were not profiled"
        session.leave_alone_after(failure, error)
    return session
