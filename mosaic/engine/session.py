"""One session: a model with its modules, profile, plan and lanes. ``mosaic.colocate`` takes its steps in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import run_aside
from mosaic.backends.table import default_backend
from mosaic.cost import CostModel
from mosaic.device import Device
from mosaic.engine.calls.attach import is_attached
from mosaic.engine.calls.thread_state import forget_cast_weights
from mosaic.engine.candidates import PlanCandidate, SampleComparison, plans_to_try
from mosaic.engine.finding.find import Finding, Sample, find_modules, runner_of, wrapped_parts
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.host.executor import Executor as HostExecutor
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.engine.placing import Executor, PlacedPlan
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.errors import BackendUnavailableError, UnsupportedModelError
from mosaic.files import load_as
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, plan_from_quotas
from mosaic.profile import Profile, note_of_others
from mosaic.profiler import (
    ProfileCache,
    ProfileSettings,
    Subject,
    environment_of,
    key_of,
    profile_modules,
    structures_of,
)
from mosaic.solver.runnable import check_method, plan_to_run
from mosaic.take_turns import TrialSettings

MIN_GAIN = 1.02
"""Predicted speed-up below which a model is left as it was."""

_LAUNCH_BOUND = 0.3
"""Share of launching in the modules' time on the device from which CUDA graphs are tried, too."""
_LOG = logging.getLogger("mosaic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``mosaic.colocate``; see there.

    Raises:
        ValueError: There is no such method, or a plan makes it needless.
    """

    sample: Sample
    """One batch; kept for a later ``replan`` without one."""
    plan: Plan | None = None
    modules: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    backend: Backend
    options: Options = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        check_method(self.options.method, self.plan)

    def changed(
        self,
        sample: Sample | None,
        plan: Plan | str | Path | None,
        modules: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
    ) -> Request:
        """Returns the request for a model that has changed: plan and profile were for the old one."""
        return replace(
            self,
            sample=self.sample if sample is None else sample,
            plan=load_as(Plan, plan),
            modules=self.modules if modules is None else names_of(modules),
            exclude=self.exclude if exclude is None else names_of(exclude) or (),
            options=replace(self.options, profile=None),
        )


def names_of(names: str | Sequence[str] | None) -> Sequence[str] | None:
    return (names,) if isinstance(names, str) else names


@dataclass(slots=True, kw_only=True)
class Session:
    """A colocated model from its request to its lanes; each method is one step.

    It ends with ``placed`` (one plan runs), with ``candidates`` (several are tried), or with neither: the model stays
    as it was.
    """

    model: nn.Module
    request: Request
    finding: Finding = field(init=False)
    """Its modules."""
    profile: Profile | None = None
    """Measurements that the plan was made from; None for a plan that was passed without them."""
    plans: tuple[Plan, ...] = ()
    """The plan that runs, or those that are tried, the best first."""
    notes: tuple[str, ...] = ()
    """Sentences for ``describe()``."""
    placed: PlacedPlan | None = None
    candidates: tuple[PlanCandidate, ...] = ()
    is_rough: bool = False
    """True if other processes used the CPU while the modules were profiled."""
    setup_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each step: ``find``, ``profile``, ``solve`` and ``open``."""
    _launch_share: float = 0.0

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
        """Finds the modules by one run of the model on the sample.

        Raises:
            UnsupportedModelError: The model cannot be colocated.
            BackendUnavailableError: It is on another device than the backend's.
        """
        request = self.request
        refuse(self.model, request.backend)
        self.finding = find_modules(self.model, request.sample, include=request.modules, exclude=request.exclude)
        refuse_graphs_of_compiler(self.finding, request.backend)

    def measure(self, cache: ProfileCache) -> None:
        """Profiles the modules, unless the request has a profile, or a plan and no profile."""
        request, subjects = self.request, self.finding.subjects
        backend, options = request.backend, request.options
        self.profile = load_as(Profile, options.profile)
        if self.profile is not None:
            environment = environment_of(backend)
            self.profile.check_matches(
                graph=self.finding.graph,
                device=backend.device,
                environment=environment,
                structures=structures_of(subjects),
            )
            cache.learn(self.profile, {subject.name: key_of(subject, backend, environment) for subject in subjects})
        elif request.plan is None:
            self.profile = profile_modules(
                self.model,
                subjects,
                self.finding.graph,
                backend,
                cache=cache,
                settings=options.profiling,
                progress=options.progress,
            )
        load = load_of_others(self.profile, options.profiling) if self.profile is not None else ""
        self.notes = (*backend.notes, load) if load else backend.notes
        self.is_rough = bool(load) and options.profile is None and backend.device.kind == "host"

    def solve(self) -> None:
        """Plans, unless the request has a plan, and chooses the plans that are tried."""
        request, graph, trial = self.request, self.finding.graph, self.trial_settings
        device, options = request.backend.device, request.options
        if request.plan is not None:
            placed = {placement.module for placement in request.plan.placements}
            for name, obstacle in self.finding.left_out.items():
                if name in placed:
                    raise UnsupportedModelError(
                        f"the plan places {name!r}, which cannot be: {obstacle}; {obstacle.todo}"
                    )
            request.plan.check_matches(graph=graph, device=device)
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
        """Opens the lanes of the plan, or gets ready to try several."""
        request, trial = self.request, self.trial_settings
        backend, graphs = request.backend, request.options.cuda_graphs
        if backend.api is not None:
            self._launch_share = warm_up(self.model, self.finding.subjects, backend.api)
        if trial is None:
            self.placed = self.open_lanes(PlanCandidate(self.plan, graphs=graphs is True), False)
        else:
            self.candidates = self._candidates_of(trial)

    def leave_alone(self, *notes: str) -> None:
        self.notes = (*notes, *(self.notes or self.request.backend.notes))
        if not self.plans:
            self.plans = (sequential_plan(self.finding.graph, self.request.backend.device),)

    def leave_alone_after(self, reason: str, error: Exception) -> None:
        """Lets the model run as it was after an error, if the request leaves the choice to Mosaic; else raises it."""
        if self.request.plan is not None or not self.request.options.may_fall_back:
            raise error
        self.profile, self.plans, self.notes, self.is_rough = None, (), (), False
        self.leave_alone(warn_of_no_profile(reason, "the model runs as it was", error))

    def open_lanes(self, candidate: PlanCandidate, adopts_shapes: bool) -> PlacedPlan:
        backend = self.request.backend.with_sms(sm_target=candidate.sm_target)
        lanes = backend.open_lanes(placement.slots for placement in candidate.plan.placements)
        try:
            executor = _executor(lanes, self.finding, graphs=candidate.graphs)
            forget_cast_weights()  # profiling and warming up cast them, on streams of their own
            return PlacedPlan(candidate.plan, self.finding, executor, adopts_shapes=adopts_shapes)
        except BaseException:
            lanes.close()
            raise

    def _candidates_of(self, trial: TrialSettings) -> tuple[PlanCandidate, ...]:
        """Returns at most ``max_plans`` candidates: the best plan, others, and variants of the best."""
        options, backend, best = self.request.options, self.request.backend, self.plan
        variants = []
        if options.cuda_graphs == "auto" and self._launch_share > _LAUNCH_BOUND:
            share = f"{self._launch_share:.2f}"
            _LOG.info("launching takes %s of the modules' time on the device: CUDA graphs are tried, too", share)
            variants.append(PlanCandidate(best, graphs=True, is_variant=True))
        confined = any(placement.quota < best.device.num_slots for placement in best.placements)
        if options.sm_target == "auto" and confined and backend.sm_target_pays():
            graphs = options.cuda_graphs is True
            variants.append(PlanCandidate(best, graphs=graphs, sm_target=True, is_variant=True))
        num_plans = max(1, trial.max_plans - len(variants))
        plans = (best, *self.plans[-(num_plans - 1) :]) if 1 < num_plans < len(self.plans) else self.plans[:num_plans]
        own = [PlanCandidate(plan, graphs=options.cuda_graphs is True) for plan in plans]
        return (*own, *variants)[: trial.max_plans]

    def compare(self) -> SampleComparison:
        sample = self.request.sample
        return SampleComparison(self.model, runner_of(self.model, sample), sample, self.finding.subjects)


# The parts of the steps.


def warm_up(model: nn.Module, subjects: Iterable[Subject], api: StreamApi) -> float:
    """Lets libraries make their first calls (plans, autotuning) off the lanes, where these have failed for others.

    Returns:
        The time that one thread takes to launch the modules forward and backward, as a share of the time that they
        take on the whole device, gaps in which it waits for launches included: near 1 where launches decide.
    """
    named = list(subjects)
    with preserved(model, alone=named, elsewhere=True):
        for _ in range(2):  # the first calls are slow, and no measure of others
            times = run_aside(api, lambda: [_launch_and_device_ms(subject, api) for subject in named])
    device_ms = sum(device for _, device in times)
    return sum(launch for launch, _ in times) / device_ms if device_ms else 0.0


def _launch_and_device_ms(subject: Subject, api: StreamApi) -> tuple[float, float]:
    """Runs one module on an idle device: what is queued for it then blocks no launch."""
    start, end = api.new_event(timing=True), api.new_event(timing=True)
    api.synchronize()
    start.record(api.current_stream())
    began = time.perf_counter()
    subject.backward(subject.forward())
    launch_ms = (time.perf_counter() - began) * 1e3
    end.record(api.current_stream())
    api.synchronize()
    return launch_ms, start.elapsed_time(end)


def sequential_plan(graph: ModuleGraph, device: Device) -> Plan:
    """Returns the plan of one module after the other on the whole device, without predicted times."""
    plan = plan_from_quotas(
        [{name: device.num_slots} for name in graph.topological_order()], graph=graph, device=device
    )
    return replace(plan, search=SearchRecord(method="sequential"))


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
    reused, total = profile.reused, len(profile.samples)
    if not reused:
        return f"planned from {total} samples measured {_minute(profile.environment.created)}"
    dates = sorted(sample.measured for sample in reused)
    first, last = _minute(dates[0]), _minute(dates[-1])
    when = first if first == last else f"{first} to {last}"
    if len(reused) == total:
        return f"planned from a profile of {when}, reused: nothing was measured again"
    return f"planned from {total} samples, of which {len(reused)} reused from {when} and {total - len(reused)} new"


def _minute(date: str) -> str:
    return f"{date[:16].replace('T', ' ')} UTC"


def backend_for(model: nn.Module) -> Backend:
    devices = {parameter.device for parameter in model.parameters()}
    cuda = next((device for device in devices if device.type == "cuda"), None)
    return default_backend(torch.device("cpu") if cuda is None else cuda)


def _executor(lanes: Lanes, finding: Finding, *, graphs: bool) -> Executor:
    if lanes.streams is None:
        return HostExecutor(lanes)
    captured = ModuleGraphs(lanes.streams.api) if graphs else None
    return StreamExecutor(lanes.streams, in_order=finding.in_order, graphs=captured)


def refuse(model: nn.Module, backend: Backend) -> None:
    """Raises UnsupportedModelError or BackendUnavailableError if a model cannot be colocated on a backend at all."""
    for name, kind, todo in wrapped_parts(model):
        raise UnsupportedModelError(
            f"{name or 'the model'} is a {kind}: its hooks fire on the lanes' threads and would give wrong gradients "
            f"or none; {todo}"
        )
    attached = next((name for name, module in model.named_modules() if is_attached(module)), None)
    if attached is not None:
        raise UnsupportedModelError(
            f"{repr(attached) if attached else 'the model'} is colocated already; remove() the handle that has it "
            "before"
        )
    wanted = backend.torch_device
    for name, parameter in model.named_parameters():
        if parameter.device != wanted:
            raise BackendUnavailableError(
                f"parameter {name!r} is on {parameter.device}, where the {backend.name} backend does not run",
                found=str(parameter.device),
                needed=str(wanted),
            )


def refuse_graphs_of_compiler(finding: Finding, backend: Backend) -> None:
    """Raises UnsupportedModelError if torch.compile runs part of a module as CUDA graphs of its own on a device.

    Inductor captures and replays them on a stream of its own, whose kernels use the whole device.
    """
    if backend.api is None:
        return
    for subject in finding.subjects:
        for path, part in subject.module.named_modules():
            compiled: Any = (
                part if type(part).__name__ == "OptimizedModule" else getattr(part, "_compiled_call_impl", None)
            )
            config: Mapping[str, Any] | None = getattr(compiled, "get_compiler_config", lambda: None)()
            if config and config.get("triton.cudagraphs"):
                name = ".".join(filter(None, (subject.name, path)))
                raise UnsupportedModelError(
                    f"{name!r} is compiled with CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), which torch "
                    "replays on a stream of its own and not on the module's SMs; compile it without a mode or with "
                    "'max-autotune-no-cudagraphs', and use Options(cuda_graphs=True) for graphs on its lane"
                )
