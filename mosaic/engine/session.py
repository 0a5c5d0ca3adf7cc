"""One session: a model with its modules, profile, plan and lanes. ``mosaic.colocate`` takes its steps in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mosaic.artifact import load_as
from mosaic.backends.base import Backend
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import run_aside
from mosaic.backends.table import default_backend
from mosaic.cost import Cost, CostModel
from mosaic.engine.calls.attach import is_attached
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.thread_state import forget_cast_weights
from mosaic.engine.finding.find import Finding, Sample, find_modules, wrapped_parts
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.host.executor import HostExecutor
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.engine.placing import Executor, PlacedPlan
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.errors import BackendUnavailableError, InfeasibleError, InvalidPlanError, UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, plan_from_quotas
from mosaic.profile import Profile, note_of_others
from mosaic.profiler import (
    ModuleFailedError,
    ProfileCache,
    ProfileSettings,
    Subject,
    environment_of,
    profile_modules,
    structures_of,
)
from mosaic.solver import solve
from mosaic.solver.exact import why_not_exact
from mosaic.solver.limits import SearchLimits
from mosaic.solver.runnable import check_method, plan_to_run
from mosaic.solver.task import SearchOptions
from mosaic.take_turns import TrialSettings

MIN_GAIN = 1.02  # predicted speed-up below which a model is left as it was
_LOG = logging.getLogger("mosaic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``mosaic.colocate``; see there."""

    sample: Sample
    plan: Plan | None = None
    modules: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    backend: Backend
    options: Options = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        check_method(self.options.method, self.plan)


def names_of(names: str | Sequence[str] | None) -> Sequence[str] | None:
    names = (names,) if isinstance(names, str) else names
    if names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"{names!r} are not names of modules; use a name or pattern such as 'trunks.*', or a list")
    return names


@dataclass(slots=True)
class PlanCandidate:
    plan: Plan
    graphs: bool = False  # launches its modules as CUDA graphs
    sm_target: bool = False  # gives libraries the SM counts of its lanes
    is_variant: bool = False  # another candidate has the same plan
    placed: PlacedPlan | None = None  # its lanes while they are open

    @property
    def name(self) -> str:
        graphs, target = ", as CUDA graphs" if self.graphs else "", ", with SM targets" if self.sm_target else ""
        return f"{name_of(self.plan)}{graphs}{target}"

    def close(self) -> None:
        if self.placed is not None:
            self.placed.executor.close()
            self.placed = None


def name_of(plan: Plan) -> str:
    """Names the modules that run side by side with their quotas, stage after stage."""
    if not plan.is_colocated:
        quotas = ", ".join(f"{p.module}:{p.quota}" for p in plan.placements)
        return f"one module after the other on lanes ({quotas})"
    return " | ".join(" + ".join(f"{p.module}:{p.quota}" for p in stage.placements) for stage in plan.stages)


def plans_to_try(best: Plan, graph: ModuleGraph, cost: Cost, *, count: int, smallest_gain: float) -> tuple[Plan, ...]:
    """Returns the best plan, the next best that have other stages, and the sequential one last; all different.

    Of each colocated stage of the best plan there is one candidate without it. Plans whose predicted speed-up is below
    ``smallest_gain`` are left out, except for the sequential one; if that leaves none, there is nothing to try.
    """
    if best.predicted_speedup < smallest_gain:
        return ()
    device, others = best.device, []
    if why_not_exact(graph) is None and count > 2:
        for stage in best.stages:
            if len(stage.placements) > 1:
                with suppress(InfeasibleError):  # there is no plan without this stage
                    search = SearchOptions(limits=SearchLimits(effort=1.0))
                    others.append(solve(graph, cost, device, method="exact", search=search, forbidden=[stage.names]))
    others = [plan for plan in others if plan.predicted_speedup >= smallest_gain]
    chosen: dict[Hashable, Plan] = {}  # by what decides how a plan runs: its stages, and the slots of each module
    for plan in (best, *sorted(others, key=lambda plan: plan.predicted_ms)):
        shape = tuple(tuple((p.module, p.cells) for p in stage.placements) for stage in plan.stages)
        chosen.setdefault(shape, plan)
    plans = list(chosen.values())[: max(1, count - 1)]
    return (*plans, solve(graph, cost, device, method="sequential"))[:count]


@dataclass(slots=True, kw_only=True)
class Session:
    """A model from its request to ``placed``, ``candidates`` of a trial, or neither; each method is one step."""

    model: nn.Module
    request: Request
    finding: Finding = field(init=False)
    profile: Profile | None = None  # None for a plan that was passed without measurements
    plans: tuple[Plan, ...] = ()
    """The plan that runs, or those that are tried, the best first."""
    notes: tuple[str, ...] = ()
    """Sentences for ``describe()``."""
    placed: PlacedPlan | None = None
    candidates: tuple[PlanCandidate, ...] = ()
    setup_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each step: ``find``, ``profile``, ``solve`` and ``open``."""
    _failed: dict[str, Obstacle] = field(default_factory=dict)  # modules that cannot run by themselves

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.setup_ms[step] = self.setup_ms.get(step, 0.0) + (time.perf_counter() - began) * 1e3

    def find(self) -> None:
        """Finds the modules by one run of the model on the sample."""
        request, exclude = self.request, (*self.request.exclude, *self._failed)
        refuse(self.model, request.backend)
        finding = find_modules(self.model, request.sample, include=request.modules, exclude=exclude)
        self.finding = replace(finding, left_out=finding.left_out | self._failed)
        refuse_graphs_of_compiler(self.finding, request.backend)

    def measure(self, cache: ProfileCache) -> None:
        """Profiles the modules, unless the request has a profile, or a plan and no profile."""
        request, backend, options = self.request, self.request.backend, self.request.options
        self.profile = load_as(Profile, options.profile)
        if self.profile is not None:
            self.profile.check_matches(
                graph=self.finding.graph,
                device=backend.device,
                environment=environment_of(backend),
                structures=structures_of(self.finding.subjects),
            )
        elif request.plan is None:
            self.profile = self._profile(cache)
        load = load_of_others(self.profile, options.profiling) if self.profile is not None else ""
        self.notes = (*backend.notes, load) if load else backend.notes

    def _profile(self, cache: ProfileCache) -> Profile:
        """Profiles the modules, without those that were chosen for the caller and cannot run by themselves."""
        options, backend = self.request.options, self.request.backend
        measure = partial(profile_modules, cache=cache, settings=options.profiling, progress=options.progress)
        while True:
            try:
                return measure(self.model, self.finding.subjects, self.finding.graph, backend)
            except ModuleFailedError as error:
                if self.request.modules is not None:
                    raise
                self._failed[error.module] = Obstacle(f"called alone, with its arguments, it raised {error.raised}")
                try:
                    self.find()
                except UnsupportedModelError:  # nothing is left to place
                    raise error from None

    def solve(self) -> None:
        """Plans, unless the request has a plan, and chooses the plans that are tried."""
        request, graph, trial = self.request, self.finding.graph, self.trial_settings
        device, options = request.backend.device, request.options
        if request.plan is not None:
            for name in (placement.module for placement in request.plan.placements):
                if (obstacle := self.finding.left_out.get(name)) is not None:
                    raise UnsupportedModelError(f"the plan places {name!r}, which cannot be: {obstacle.sentence}")
            request.plan.check_matches(graph=graph, device=device)
            if (count := request.plan.num_devices) > 1:
                raise InvalidPlanError(
                    f"the plan is for {count} devices, and this is one process; start {count} by torchrun, or plan "
                    "for one device"
                )
            self.plans = (request.plan,)
            return
        assert self.profile is not None
        cost = CostModel.from_profile(self.profile)
        plan = plan_to_run(options.method, graph, cost, device)
        plans: Sequence[Plan] = (plan,)
        if trial is not None and plan.predicted_speedup >= MIN_GAIN:
            gain = min(MIN_GAIN, trial.smallest_gain)
            plans = plans_to_try(plan, graph, cost, count=trial.max_plans, smallest_gain=gain)
        share = self.profile.environment.foreign_cpu_share
        self.plans = tuple(replace(plan, foreign_cpu_share=share) for plan in plans)

    @property
    def trial_settings(self) -> TrialSettings | None:
        """The bounds of the trial; None where the plan runs untried."""
        trial, options = self.request.options.trial, self.request.options
        if trial != "auto":
            return trial
        return TrialSettings() if self.request.plan is None and options.method == "auto" else None

    @property
    def gains(self) -> bool:
        """Returns True if the plan is worth running; one that was passed or comes of a named method always is."""
        is_free = self.request.options.method == "auto" or self.trial_settings is not None
        return self.request.plan is not None or not is_free or self.plan.predicted_speedup >= MIN_GAIN

    def open(self) -> None:
        """Opens the lanes of the plan, or prepares the candidates of a trial."""
        request, trial = self.request, self.trial_settings
        backend, graphs = request.backend, request.options.cuda_graphs
        if backend.api is not None:
            warm_up(self.model, [s for s in self.finding.subjects if s.name not in self.finding.in_place], backend.api)
        if trial is None:
            self.placed = self.open_lanes(PlanCandidate(self.plan, graphs=graphs is True))
        else:
            self.candidates = self._candidates_of(trial)

    def leave_alone(self, note: str) -> None:
        graph, backend = self.finding.graph, self.request.backend
        self.notes = (note, *(self.notes or backend.notes))
        if not self.plans:
            quotas = [{name: backend.device.num_slots} for name in graph.topological_order()]
            plan = plan_from_quotas(quotas, graph=graph, device=backend.device)
            self.plans = (replace(plan, search=SearchRecord(method="sequential")),)

    def leave_alone_after(self, reason: str, error: Exception) -> None:
        """Lets the model run as it was after an error, if the request leaves the choice to Mosaic; else raises it."""
        if self.request.plan is not None or not self.request.options.may_fall_back:
            raise error
        self.profile, self.plans, self.notes = None, (), ()
        self.leave_alone(warn_of_no_profile(reason, "the model runs as it was", error))

    def open_lanes(self, candidate: PlanCandidate) -> PlacedPlan:
        backend = self.request.backend
        backend = backend.with_sm_target() if candidate.sm_target else backend
        lanes = backend.open_lanes(placement.slots for placement in candidate.plan.placements)
        try:
            executor: Executor
            if lanes.streams is None:
                executor = HostExecutor(lanes)
            else:
                graphs = ModuleGraphs(lanes.streams.api) if candidate.graphs else None
                executor = StreamExecutor(lanes.streams, graphs=graphs)
            forget_cast_weights()  # profiling and warming up cast them, on streams of their own
            return PlacedPlan(candidate.plan, self.finding, executor)
        except BaseException:
            lanes.close()
            raise

    def _candidates_of(self, trial: TrialSettings) -> tuple[PlanCandidate, ...]:
        """Returns at most ``max_plans`` candidates: the best plan, others, and variants of the best."""
        options, best = self.request.options, self.plan
        graphs, variants = options.cuda_graphs is True, []
        if options.cuda_graphs == "auto" and self.request.backend.api is not None:
            variants.append(PlanCandidate(best, graphs=True, is_variant=True))
        is_confined = any(placement.quota < best.device.num_slots for placement in best.placements)
        if options.sm_target == "auto" and is_confined and self.request.backend.sm_target_pays():
            variants.append(PlanCandidate(best, graphs=graphs, sm_target=True, is_variant=True))
        num_others = max(0, trial.max_plans - len(variants) - 1)
        others = self.plans[1:][-num_others:] if num_others else ()  # the sequential one is the last
        return (*(PlanCandidate(plan, graphs=graphs) for plan in (best, *others)), *variants)[: trial.max_plans]


def warm_up(model: nn.Module, subjects: list[Subject], api: StreamApi) -> None:
    """Lets libraries make their first calls (plans, autotuning) off the lanes, where these have failed.

    The subjects must need nothing that the model sets around their calls.
    """

    def run() -> None:
        for subject in subjects:
            subject.backward(subject.forward())

    with preserved(model, alone=subjects):
        run_aside(api, run)


def warn_of_no_profile(reason: str, what_runs: str, error: Exception) -> str:
    """Logs a warning that nothing was profiled, and returns it for ``describe()``."""
    sentence = f"{reason}, so {what_runs} until the next start: {error}"
    _LOG.warning("%s", sentence)
    return sentence


def load_of_others(profile: Profile, settings: ProfileSettings | None) -> str:
    """Returns a sentence about other processes that disturbed a profile; empty where its settings allow their load."""
    share, limit = profile.environment.foreign_cpu_share, (settings or ProfileSettings()).foreign_share
    return f"while the modules were profiled, {note_of_others(share, profile.device)}" if share > limit else ""


def source_of(profile: Profile) -> str:
    began, measured = profile.environment.began, [sample.measured for sample in profile.samples if sample.measured]
    num_reused = sum(date < began for date in measured)
    date = max(measured, default=profile.environment.created)[:16].replace("T", " ")
    reused = f", {num_reused} of them reused from earlier profiles" if num_reused else ""
    return f"planned from {len(profile.samples)} samples{reused}; the latest is of {date} UTC"


def backend_for(model: nn.Module) -> Backend:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is not a model; pass an nn.Module")
    gpus = (parameter.device for parameter in model.parameters() if parameter.device.type == "cuda")
    return default_backend(next(gpus, torch.device("cpu")))


def refuse(model: nn.Module, backend: Backend) -> None:
    """Raises an error if a model cannot be colocated on a backend at all."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is not a model; pass an nn.Module")
    for name, kind in wrapped_parts(model):
        raise UnsupportedModelError(
            f"{name or 'the model'} is a {kind}: its hooks fire on the lanes' threads and would give wrong gradients "
            "or none; colocate the plain model, and compile its branches in place: model.branch.compile()"
        )
    for name in (name for name, module in model.named_modules() if is_attached(module)):
        raise UnsupportedModelError(f"{name or 'the model'} is colocated already; remove() the handle that has it")
    wanted = backend.torch_device
    for name, parameter in model.named_parameters():
        if parameter.device != wanted:
            raise BackendUnavailableError(
                f"parameter {name!r} is on {parameter.device}, which the {backend.name} backend does not support",
                found=str(parameter.device),
                needed=str(wanted),
            )


def refuse_graphs_of_compiler(finding: Finding, backend: Backend) -> None:
    """Raises UnsupportedModelError if torch.compile runs part of a module as CUDA graphs, on a stream of its own."""
    for subject in finding.subjects if backend.api is not None else ():
        for path, part in subject.module.named_modules():
            compiled: Any = part if type(part).__name__ == "OptimizedModule" else part._compiled_call_impl
            config: Mapping[str, Any] | None = getattr(compiled, "get_compiler_config", lambda: None)()
            if config and config.get("triton.cudagraphs"):
                raise UnsupportedModelError(
                    f"{'.'.join(filter(None, (subject.name, path)))!r} is compiled with CUDA graphs (mode "
                    "'reduce-overhead' or 'max-autotune'), which torch replays on a stream of its own and not on the "
                    "module's SMs; compile it without a mode or with 'max-autotune-no-cudagraphs', and use "
                    "Options(cuda_graphs=True) for graphs on its lane"
                )
