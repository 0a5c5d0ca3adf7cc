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
    """Makes a model's own training loop run its modules side by side; changes nothing else about it.

    Finds the modules that can be placed by one run on ``sample``, profiles them unless measurements are given, solves
    for stages and quotas unless ``plan`` is given, and opens the lanes. Afterwards ``model(...)`` and
    ``loss.backward()`` compute what they computed before: on the host backend bit for bit at equal thread counts.

    In the first steps of the loop's optimizer (at most 120, ``TrialSettings``) the plain loop and at most three plans
    take turns; a plan whose losses or gradients on the sample differ from the plain loop's is left out. The fastest
    runs from then on, and the plain loop if none beats it beyond the noise. Nothing is tried if no plan is predicted to
    gain 2 %; a plan that is given runs as it is. On the host a trial's steps run at the thread counts of its plans, so
    two runs agree bit for bit only with ``trial=None`` and one plan, or at one thread.

    Where torchrun started several ranks, every rank calls it with its own batch: see ``colocate_ranks``.

    Args:
        model: Any module tree, on the backend's device, in the mode in which it will train. The classes of placed
            modules are swapped, as FSDP2 does; parameters, keys and references stay.
        sample: One batch as it will be trained on (by this rank): a dict of keywords, a sequence of positions, a
            tensor, or a function that runs the model once.
        plan: A plan, or the path of its file, to run instead of solving for one; its device i is rank i.
        modules: Names or patterns of the modules to place, such as ``"trunks.*"``; found by default.
        exclude: Names or patterns of modules to leave in place.
        backend: A backend or its name (``"cuda"``, ``"cuda:1"``, ``"host"``); by default the GPU of the model's
            parameters, or the host (of several ranks, this rank's share of its cores).
        options: Settings of planning, measuring and running.

    Raises:
        UnsupportedModelError: No module can be placed or, on several ranks, split over them.
        InvalidPlanError, InvalidProfileError: It is for another model, device or number of ranks, or ranks differ.
        UnstableMeasurementError: Other processes used the CPU, and ``options.profiling`` is strict.
        BackendUnavailableError: The backend cannot run the model's device, or ranks differ in device or versions.
        RankFailedError: Another rank has failed; names it.
        ValueError, TypeError: An argument is wrong or contradicts another, or the model is colocated already.
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
    """Takes a session's steps; also those of ``handle.replan``."""
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
