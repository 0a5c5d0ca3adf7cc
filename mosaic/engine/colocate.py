"""``mosaic.colocate``: one call before the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.host.backend import HostBackend
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.cost import CostModel
from mosaic.engine.calls.thread_state import forget_cast_weights
from mosaic.engine.finding.find import Finding, Sample, find_modules
from mosaic.engine.graphs import StageGraphs
from mosaic.engine.handle import Handle
from mosaic.engine.host.executor import Executor
from mosaic.engine.placing import PlacedPlan, Runs
from mosaic.engine.profiled import IfBusy, falls_back, plan_in_turn, warn_of_busy
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.first_calls import warm_up
from mosaic.engine.trial.clock import EventClock, HostClock
from mosaic.engine.trial.plans import plans_to_try
from mosaic.engine.trial.settings import StepClock, TrialSettings
from mosaic.engine.trial.setup import TrialSetup
from mosaic.engine.trial.turn import turn_of_process
from mosaic.errors import BackendUnavailableError, UnstableMeasurementError, UnsupportedModelError
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import (
    ProfileCache,
    ProfileSettings,
    environment_of,
    open_cache,
    profile_modules,
    structures_of,
)
from mosaic.profiler.sweep import ProgressCallback
from mosaic.solver.runnable import check_method, plan_to_run

SMALLEST_GAIN = 1.02
"""Predicted speed-up below which a model is left as it was."""

_LOG = logging.getLogger("mosaic")
_WRAPPERS = {
    "DistributedDataParallel": "wrap the branches in a process group of their own instead",
    "FullyShardedDataParallel": "colocate the plain model",
    "FSDPModule": "colocate the plain model",
    "DataParallel": "colocate the plain model",
    "OptimizedModule": "colocate the plain model and compile its branches in place: model.branch.compile()",
}


def colocate(
    model: nn.Module,
    *,
    sample: Sample,
    modules: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    plan: Plan | None = None,
    method: str = "auto",
    profile: Profile | None = None,
    cache: ProfileCache | Path | Literal["user"] | None = "user",
    backend: Backend | None = None,
    graphs: bool | Literal["auto"] = "auto",
    trial: TrialSettings | Literal["auto"] | None = "auto",
    settings: ProfileSettings | None = None,
    if_busy: IfBusy = "plain",
    progress: ProgressCallback | None = None,
) -> Handle:
    """Makes a model's own training loop run its modules side by side; changes nothing else about it.

    Finds the modules that can be placed by one run on ``sample``, profiles them unless ``profile`` is given, solves
    for stages and quotas unless ``plan`` is given, and opens the lanes. Afterwards ``model(...)`` and
    ``loss.backward()`` compute what they computed before: on the host backend bit for bit at equal thread counts.

    A plan that Mosaic solved for is tried before it is kept. In the loop's first steps the plain loop, the best plan,
    the next best ones and the sequential one take turns, a few steps each; what was measured goes back into the
    cost model and the plan is solved again. The fastest runs from then on, and the plain loop if none beats it
    beyond the noise. A trial takes at most 120 steps, and loses at most as much time as 20 steps of the plain loop take
    (``TrialSettings``). It is repeated when the loop has become slower, has other shapes, or another process has come
    to the GPU. Nothing is tried where no plan is predicted to gain 2 %. A plan that is given runs as it is.

    On the host, steps of a trial run at the thread counts of the plans that are tried, so that two runs agree bit for
    bit only with ``trial=None`` and one plan, or at one thread.

    Args:
        model: Any module tree, on the backend's device, in the mode in which it will train. It is changed in place:
            the classes of placed modules are swapped, as FSDP2 does; parameters, keys and references stay.
        sample: One batch as it will be trained on: a dict of keywords, a sequence of positions, a tensor, or a
            function that runs the model once.
        modules: Names or patterns of the modules to place, such as ``["trunks.*"]``; found by default.
        exclude: Names or patterns of modules to leave where they are.
        plan: A plan to run instead of solving for one.
        method: Who plans: a solver, or a planner that Mosaic is compared with (``mosaic.solver.runnable.RUNNABLE``).
            The plan of a method that is named runs as it is, like one that is given; ``auto`` is tried first.
        profile: Measurements to plan from instead of taking them. No profile knows the optimizer: a plan leaves room
            for AdamW's two moments in 32 bits, 8 bytes for each parameter that trains.
        cache: Measurements of earlier runs: what is there is not taken again, and what is taken is kept. By default in
            the user's cache folder (``~/.cache/mosaic/profiles``, or under ``$XDG_CACHE_HOME``); None for none.
        backend: Where to run; by default the GPU that holds the model's parameters, or the host.
        graphs: On a GPU, launch placed modules as CUDA graphs wherever that is right; they are captured at their first
            calls. For modules of many small operators, which one thread cannot launch fast enough. ``auto``: a trial
            also tries the best plan that way, where launching takes more than 0.3 of the modules' time on the device;
            without a trial, and on the host, nothing is captured.
        trial: How to try plans; ``auto`` is ``TrialSettings()`` where Mosaic solves the plan, and None where it is
            given. None runs the plan, unless it was solved for and its predicted speed-up is under 2 %.
        settings: How carefully to profile.
        if_busy: What to do where other processes take so much of the machine that measuring means nothing (60 % of
            its CPU time, ``ProfileSettings.refuse_share``): ``plain`` logs a warning and runs the model as it was,
            with the reason in ``describe()``; ``raise`` raises. What the cache has needs no measuring. A method that
            is named raises in any case, since nothing else was asked for.
        progress: Told what is being profiled, how much is done, and how much there is.

    Raises:
        UnsupportedModelError: No module can be placed, or the model is wrapped in something that cannot be colocated.
        InvalidPlanError: The plan is for another model or device.
        InvalidProfileError: The profile is of another model or device.
        UnstableMeasurementError: The machine is too busy to profile, and ``if_busy`` or a named method forbids to go
            on without.
        BackendUnavailableError: The model is on a device that the backend does not run.
        ValueError: A plan and a method were given, or there is no such method; graphs are asked for on the host.
    """
    check_method(method, plan)
    may_fall_back = falls_back(if_busy, method)
    kept = open_cache(cache)
    backend = backend or _backend_for(model)
    _refuse(model, backend)
    if not isinstance(graphs, bool) and graphs != "auto":
        raise ValueError(f"graphs={graphs!r}; use True, False or 'auto'")
    if graphs is True and backend.device.kind == "host":
        raise ValueError("graphs=True needs a model on a GPU; leave graphs out on the host")
    finding = find_modules(model, sample, include=modules, exclude=exclude)
    if profile is not None:
        profile.check_matches(
            graph=finding.graph,
            device=backend.device,
            environment=environment_of(backend),
            structures=structures_of(finding.subjects),
        )
    if plan is not None:
        plan.check_matches(graph=finding.graph, device=backend.device)
        opening = _Opening(model, finding, backend)
        if not isinstance(trial, TrialSettings):
            placed = opening(plan, graphs is True, False)
            return _handle(model, finding, plan, profile, backend, placed=placed)
        known = CostModel.from_profile(profile) if profile is not None else None
        setup = _setup(opening, (plan,), known, trial, graphs=graphs)
        return _handle(model, finding, plan, profile, backend, trial=setup)
    if profile is None:
        try:
            profile = profile_modules(
                model, finding.subjects, finding.graph, backend, cache=kept, settings=settings, progress=progress
            )
        except UnstableMeasurementError as error:
            if not may_fall_back:
                raise
            note = warn_of_busy("the modules were not profiled", "the model runs as it was", error)
            plan = plan_in_turn(finding.graph, backend.device)
            return Handle(model, finding, plan, profile=None, notes=(note, *backend.notes))
    cost = CostModel.from_profile(profile)
    plan = plan_to_run(method, finding.graph, cost, backend.device)
    opening = _Opening(model, finding, backend)
    if method != "auto" and not isinstance(trial, TrialSettings):
        return _handle(model, finding, plan, profile, backend, placed=opening(plan, graphs is True, False))
    if plan.predicted_speedup < SMALLEST_GAIN:
        note = (
            f"the best plan is predicted to be {plan.predicted_speedup:.3f} times as fast as one module after the "
            f"other; below {SMALLEST_GAIN} the model is left as it was"
        )
        _LOG.info(note)
        return Handle(model, finding, plan, profile=profile, notes=(note, *backend.notes))
    if trial is None:
        return _handle(model, finding, plan, profile, backend, placed=opening(plan, graphs is True, False))
    chosen = TrialSettings() if trial == "auto" else trial
    plans = plans_to_try(
        plan, finding.graph, cost, count=chosen.max_plans, smallest_gain=min(SMALLEST_GAIN, chosen.smallest_gain)
    )
    setup = _setup(opening, plans, cost, chosen, graphs=graphs)
    return _handle(model, finding, plan, profile, backend, trial=setup)


class _Opening:
    """Opens the lanes of one plan after another for one model."""

    def __init__(self, model: nn.Module, finding: Finding, backend: Backend) -> None:
        self._model = model
        self._finding = finding
        self.backend = backend
        self._launch_share: float | None = None

    @property
    def launch_share(self) -> float:
        """What ``warm_up`` measured; 0 before, and on the host."""
        return self._launch_share or 0.0

    def __call__(self, plan: Plan, graphs: bool, adopts_shapes: bool) -> PlacedPlan:
        lanes = self.backend.open_lanes(placement.slots for placement in plan.placements)
        try:
            if isinstance(lanes, StreamLanes) and self._launch_share is None:
                self._launch_share = warm_up(self._model, self._finding.subjects, lanes)
            executor = _executor(lanes, self._finding, graphs=graphs)
            forget_cast_weights()  # profiling and warming up cast them, on streams of their own
            return PlacedPlan(plan, self._finding, executor, adopts_shapes=adopts_shapes)
        except BaseException:
            lanes.close()
            raise


def _handle(
    model: nn.Module, finding: Finding, plan: Plan, profile: Profile | None, backend: Backend, **running: Any
) -> Handle:
    placed: PlacedPlan | None = running.get("placed")
    try:
        return Handle(model, finding, plan, profile=profile, notes=backend.notes, **running)
    except BaseException:
        if placed is not None:
            placed.close()
        raise


def _setup(
    opening: _Opening,
    plans: tuple[Plan, ...],
    cost: CostModel | None,
    settings: TrialSettings,
    *,
    graphs: bool | Literal["auto"],
) -> TrialSetup:
    backend = opening.backend
    tenants: Callable[[], frozenset[int]] | None = getattr(backend, "other_processes", None)
    return TrialSetup(
        settings=settings,
        plans=plans,
        graphs=(True, False) if graphs is True else (False,),
        launch_share=lambda: opening.launch_share if graphs == "auto" else 0.0,
        cost=cost,
        open=opening,
        opens_ahead=backend.device.kind != "host",
        clock=settings.clock if settings.clock is not None else clock_of(backend),
        turn=turn_of_process(),
        tenants=tenants,
    )


def clock_of(backend: Backend) -> StepClock:
    """Returns what tells the time of steps on a backend."""
    api = getattr(backend, "api", None)
    return HostClock() if api is None else EventClock(api)


def _executor(lanes: Lanes, finding: Finding, *, graphs: bool) -> Runs:
    if isinstance(lanes, StreamLanes):
        captured = StageGraphs(lanes.api) if graphs else None
        return StreamExecutor(lanes, in_order=finding.in_order, graphs=captured)
    return Executor(lanes)


def _backend_for(model: nn.Module) -> Backend:
    """Returns the backend of the device that holds the model's parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    cuda = next((device for device in devices if device.type == "cuda"), None)
    if cuda is None:
        return HostBackend()
    from mosaic.backends.cuda.driver import CudaBackend

    return CudaBackend(torch.cuda.current_device() if cuda.index is None else cuda.index)


def wrapped_parts(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yields what is wrapped in something that cannot be colocated: its name, the wrapper, and what to do."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ == "OptimizedModule" and name:  # a compiled branch runs on its lane
                continue
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                yield name, kind.__name__, _WRAPPERS[kind.__name__]


def _refuse(model: nn.Module, backend: Backend) -> None:
    for name, kind, todo in wrapped_parts(model):
        raise UnsupportedModelError(
            f"{name or 'the model'} is a {kind}: its hooks fire on the lanes' threads and would give wrong gradients "
            f"or none; {todo}"
        )
    wanted = backend.torch_device
    for name, parameter in model.named_parameters():
        if parameter.device != wanted:
            raise BackendUnavailableError(
                f"parameter {name!r} is on {parameter.device}, where the {backend.name} backend does not run",
                found=str(parameter.device),
                needed=str(wanted),
            )
