"""``mosaic.colocate`` on one rank: one call before the loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.host.backend import SPINNING
from mosaic.backends.table import default_backend
from mosaic.cost import CostModel
from mosaic.engine.calls.attach import is_attached
from mosaic.engine.calls.thread_state import forget_cast_weights
from mosaic.engine.finding.find import Finding, Sample, find_modules
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.handle import Handle
from mosaic.engine.host.executor import Executor
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.engine.placing import PlacedPlan, Runs
from mosaic.engine.profiled import load_of_others, plan_in_turn, warn_of_no_profile
from mosaic.engine.ready import Asked, Laps, Ready
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.first_calls import warm_up
from mosaic.engine.trial.clock import EventClock, HostClock
from mosaic.engine.trial.plans import plans_to_try
from mosaic.engine.trial.settings import StepClock, TrialSettings
from mosaic.engine.trial.setup import TrialSetup, TriedPlan
from mosaic.engine.trial.turn import turn_of_process
from mosaic.errors import BackendUnavailableError, UnstableMeasurementError, UnsupportedModelError
from mosaic.files import load_as
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import ProfileCache, environment_of, key_of, open_cache, profile_modules, structures_of
from mosaic.solver.runnable import plan_to_run

MIN_GAIN = 1.02
"""Predicted speed-up below which a model is left as it was."""

_LOG = logging.getLogger("mosaic")
_WRAPPERS = {
    "DistributedDataParallel": "wrap the branches in a process group of their own instead",
    "FullyShardedDataParallel": "colocate the plain model",
    "FSDPModule": "colocate the plain model",
    "DataParallel": "colocate the plain model",
    "OptimizedModule": "colocate the plain model and compile its branches in place: model.branch.compile()",
}


def colocate_one(
    model: nn.Module,
    sample: Sample,
    *,
    plan: Plan | None = None,
    modules: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    backend: Backend | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Handle:
    """Colocates a model on this process's device; see ``mosaic.colocate``.

    A plan that Mosaic solved for is tried before it is kept. In the loop's first steps the plain loop, the best plan,
    the next best ones and the sequential one take turns, a few steps each; what was measured goes back into the
    cost model and the plan is solved again. The fastest runs from then on, and the plain loop if none beats it
    beyond the noise. A trial takes at most 120 steps, and loses at most as much time as 20 steps of the plain loop take
    (``TrialSettings``). It is repeated when the loop has become slower, has other shapes, or another process has come
    to the GPU. Nothing is tried where no plan is predicted to gain 2 %. A plan that is given runs as it is.

    On the host, steps of a trial run at the thread counts of the plans that are tried, so that two runs agree bit for
    bit only with ``trial=None`` and one plan, or at one thread.
    """
    asked = Asked(
        sample=sample,
        plan=plan,
        modules=modules,
        exclude=exclude,
        backend=options.with_sms(backend or _backend_for(model)),
        options=options,
    )
    assert asked.backend is not None
    if SPINNING in asked.backend.notes and asked.backend.device.num_slots > 1:
        _LOG.warning("%s", SPINNING)
    make = partial(_ready, model, open_cache(options.cache))
    return Handle(model, make(asked), asked=asked, make=make)


def _ready(model: nn.Module, kept: ProfileCache, asked: Asked) -> Ready:
    """Finds a model's modules, measures what is not known of them, plans, and opens lanes."""
    backend, options, laps = asked.backend, asked.options, Laps()
    assert backend is not None
    options.check_for_one_rank(backend.device.kind)
    _refuse(model, backend)
    with laps("find"):
        finding = find_modules(model, asked.sample, include=asked.modules, exclude=asked.exclude)
    refuse_graphs_of_compiler(finding, backend)
    try:
        with laps("profile"):
            profile = _profile(model, finding, kept, asked)
    except (UnstableMeasurementError, torch.OutOfMemoryError) as error:
        return _left_alone("the modules were not profiled", error, finding, asked, laps)
    with laps("solve"):
        plans, trial = _plans(finding, profile, asked)
    load = load_of_others(profile, options.profiling) if profile is not None else ""
    ready = Ready(
        finding=finding,
        plan=plans[0],
        profile=profile,
        notes=(*backend.notes, load) if load else backend.notes,
        is_rough=bool(load) and options.profile is None and backend.device.kind == "host",
        setup_ms=laps.ms,
    )
    if asked.plan is None and (options.method == "auto" or trial is not None) and plans[0].predicted_speedup < MIN_GAIN:
        note = (
            f"the best plan is predicted to be {plans[0].predicted_speedup:.3f} times as fast as one module after the "
            f"other; below {MIN_GAIN} the model is left as it was"
        )
        finding.forget_run()
        return replace(ready, notes=(note, *ready.notes))
    opening = _Opening(model, finding, backend)
    try:
        with laps("open"):
            opening.warm_up()
    except torch.OutOfMemoryError as error:
        return _left_alone("there was no memory to run modules on lanes", error, finding, asked, laps)
    with laps("open"):
        if trial is None:
            return replace(ready, placed=opening(TriedPlan(plans[0], options.cuda_graphs is True, None), False))
        cost = CostModel.from_profile(profile) if profile is not None else None
        return replace(ready, trial=_setup(opening, plans, cost, trial, options))


def _left_alone(why: str, error: Exception, finding: Finding, asked: Asked, laps: Laps) -> Ready:
    """Leaves the model as it was, where it is left to Mosaic what runs; else raises the error."""
    assert asked.backend is not None
    if asked.plan is not None or not asked.options.may_fall_back:
        raise error
    note = warn_of_no_profile(why, "the model runs as it was", error)
    finding.forget_run()
    plan = plan_in_turn(finding.graph, asked.backend.device)
    return Ready(finding=finding, plan=plan, notes=(note, *asked.backend.notes), setup_ms=laps.ms)


def _profile(model: nn.Module, finding: Finding, kept: ProfileCache, asked: Asked) -> Profile | None:
    """Returns the profile that was given, or measures what is not known; None where a plan was given without one."""
    backend, profile = asked.backend, load_as(Profile, asked.options.profile)
    assert backend is not None
    if profile is not None:
        environment = environment_of(backend)
        profile.check_matches(
            graph=finding.graph,
            device=backend.device,
            environment=environment,
            structures=structures_of(finding.subjects),
        )
        kept.learn(profile, {subject.name: key_of(subject, backend, environment) for subject in finding.subjects})
    elif asked.plan is None:
        profile = profile_modules(
            model,
            finding.subjects,
            finding.graph,
            backend,
            cache=kept,
            settings=asked.options.profiling,
            progress=asked.options.progress,
        )
    return profile


def _plans(finding: Finding, profile: Profile | None, asked: Asked) -> tuple[tuple[Plan, ...], TrialSettings | None]:
    """Returns the plan to run, or those to try, the best first, and how to try them."""
    backend, options, trial = asked.backend, asked.options, asked.options.trial
    assert backend is not None
    if asked.plan is not None:
        placed = {placement.module for placement in asked.plan.placements}
        for name, obstacle in finding.left_out.items():
            if name in placed:
                raise UnsupportedModelError(f"the plan places {name!r}, which cannot be: {obstacle}; {obstacle.todo}")
        asked.plan.check_matches(graph=finding.graph, device=backend.device)
        return (asked.plan,), None if trial == "auto" else trial
    assert profile is not None
    cost = CostModel.from_profile(profile)
    plan = plan_to_run(options.method, finding.graph, cost, backend.device)
    if trial == "auto":
        trial = TrialSettings() if options.method == "auto" else None
    if trial is None or plan.predicted_speedup < MIN_GAIN:
        return (plan,), trial
    gain = min(MIN_GAIN, trial.smallest_gain)
    return plans_to_try(plan, finding.graph, cost, count=trial.max_plans, smallest_gain=gain), trial


class _Opening:
    """Opens the lanes of one plan after another for one model.

    Attributes:
        launch_share: What ``warm_up`` measured; 0 before, and on the host.
    """

    def __init__(self, model: nn.Module, finding: Finding, backend: Backend) -> None:
        self._model = model
        self._finding = finding
        self.backend = backend
        self.launch_share = 0.0

    def warm_up(self) -> None:
        """Lets libraries make their first calls off the lanes."""
        if self.backend.api is not None:
            self.launch_share = warm_up(self._model, self._finding.subjects, self.backend.api)

    def __call__(self, candidate: TriedPlan, adopts_shapes: bool) -> PlacedPlan:
        plan, backend = candidate.plan, self.backend.with_sms(sm_target=candidate.sm_target)
        lanes = backend.open_lanes(placement.slots for placement in plan.placements)
        try:
            self._finding.forget_run()
            executor = _executor(lanes, self._finding, graphs=candidate.graphs)
            forget_cast_weights()  # profiling and warming up cast them, on streams of their own
            return PlacedPlan(plan, self._finding, executor, adopts_shapes=adopts_shapes)
        except BaseException:
            lanes.close()
            raise


def _setup(
    opening: _Opening,
    plans: tuple[Plan, ...],
    cost: CostModel | None,
    settings: TrialSettings,
    options: Options,
) -> TrialSetup:
    backend, graphs = opening.backend, options.cuda_graphs
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
        sm_target=options.sm_target == "auto" and backend.sm_target_pays(),
        tenants=backend.other_processes,
    )


def clock_of(backend: Backend) -> StepClock:
    """Returns what tells the time of steps on a backend."""
    return HostClock() if backend.api is None else EventClock(backend.api)


def _executor(lanes: Lanes, finding: Finding, *, graphs: bool) -> Runs:
    if lanes.streams is None:
        return Executor(lanes)
    captured = ModuleGraphs(lanes.streams.api) if graphs else None
    return StreamExecutor(lanes.streams, in_order=finding.in_order, graphs=captured)


def _backend_for(model: nn.Module) -> Backend:
    """Returns the backend of the device that holds the model's parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    cuda = next((device for device in devices if device.type == "cuda"), None)
    return default_backend(torch.device("cpu") if cuda is None else cuda)


def wrapped_parts(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yields what is wrapped in something that cannot be colocated: its name, the wrapper, and what to do."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ == "OptimizedModule" and name:  # a compiled branch runs on its lane
                continue
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                yield name, kind.__name__, _WRAPPERS[kind.__name__]


def refuse_graphs_of_compiler(finding: Finding, backend: Backend) -> None:
    """Raises UnsupportedModelError if torch.compile runs part of a module as CUDA graphs of its own on a device.

    Inductor captures and replays them on a stream of its own, whose kernels use the whole device.
    """
    if backend.api is None:
        return
    for subject in finding.subjects:
        for path, part in subject.module.named_modules():
            compiled = part if type(part).__name__ == "OptimizedModule" else getattr(part, "_compiled_call_impl", None)
            config = getattr(compiled, "get_compiler_config", lambda: None)()
            if config and config.get("triton.cudagraphs"):
                name = ".".join(filter(None, (subject.name, path)))
                raise UnsupportedModelError(
                    f"{name!r} is compiled with CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), which torch "
                    "replays on a stream of its own and not on the module's SMs; compile it without a mode or with "
                    "'max-autotune-no-cudagraphs', and use Options(cuda_graphs=True) for graphs on its lane"
                )


def _refuse(model: nn.Module, backend: Backend) -> None:
    for name, kind, todo in wrapped_parts(model):
        raise UnsupportedModelError(
            f"{name or 'the model'} is a {kind}: its hooks fire on the lanes' threads and would give wrong gradients "
            f"or none; {todo}"
        )
    taken = next((name for name, module in model.named_modules() if is_attached(module)), None)
    if taken is not None:
        raise UnsupportedModelError(
            f"{repr(taken) if taken else 'the model'} is colocated already; remove() the handle that has it before"
        )
    wanted = backend.torch_device
    for name, parameter in model.named_parameters():
        if parameter.device != wanted:
            raise BackendUnavailableError(
                f"parameter {name!r} is on {parameter.device}, where the {backend.name} backend does not run",
                found=str(parameter.device),
                needed=str(wanted),
            )
