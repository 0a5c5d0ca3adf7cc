"""Profiles a graph: each module alone at every degree and quota, then modules side by side."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import platform
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from time import monotonic

import torch
from torch import nn

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.cuda.driver import describe_driver
from mosaic.backends.cuda.environment import describe_nvml
from mosaic.errors import BackendUnavailableError, UnstableMeasurementError, UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.profile import Environment, ModuleMemory, PairSample, Phase, Profile, Sample
from mosaic.profiler.cache import ModuleRecord, ProfileCache, key_of, structures_of
from mosaic.profiler.communication import Network
from mosaic.profiler.noise import Retries
from mosaic.profiler.settings import ProfileSettings, QuotaChoice, choose_quotas
from mosaic.profiler.subject import Subject, split_batch
from mosaic.profiler.timing import measure, measure_beside

_LOG = logging.getLogger("mosaic")
_LANE_BYTES = 64 << 20
"""cuBLAS workspaces of a lane: 32 MiB on Hopper per pair of stream and handle; the launching thread and autograd's have
one handle each."""
_OUT_OF_MEMORY = "out of memory"
_MAX_CHARACTERS = 300

ProgressCallback = Callable[[str, int, int], None]
"""Called with the next measurement, the number of completed ones, and the approximate total."""


class ModuleFailedError(UnsupportedModelError):
    """A module cannot be run by itself, with the arguments of its call in the model."""

    def __init__(self, message: str, *, module: str, raised: str) -> None:
        super().__init__(message)
        self.module = module
        self.raised = raised


def profile_modules(
    model: nn.Module,
    subjects: Sequence[Subject],
    graph: ModuleGraph,
    backend: Backend,
    *,
    quotas: Iterable[int] | QuotaChoice = "tenths",
    degrees: Iterable[int] = (1,),
    network: Network | None = None,
    cache: ProfileCache | None = None,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measures every module of a graph on a backend; the model is not changed.

    A point at which a module fails is recorded as infeasible with its error. Modules take turns: first the largest and
    the smallest quota of each, then the others from large to small, then modules side by side. Measurements on the host
    that other processes disturb are repeated within ``settings.retry_seconds``. Degrees above 1 are composed: one
    replica's share of the batch is timed, and the gradient reduction over ``network`` is added to its backward.

    Raises:
        InvalidPlanError: A quota is outside the device.
        ValueError: A degree is below 1, or above 1 without a network.
        ModuleFailedError: A module fails at every quota.
        UnstableMeasurementError: Other processes used the CPU, and ``settings`` are strict; or memory ran out.
    """
    chosen, sorted_degrees = choose_quotas(quotas, backend.device), tuple(sorted({1, *degrees}))
    if sorted_degrees[0] < 1:
        raise ValueError(f"degrees={sorted_degrees}; use 1 or more")
    if len(sorted_degrees) > 1 and network is None:
        raise ValueError(f"degrees={sorted_degrees} need a network; pass a Cluster or a Link")
    settings, cache = settings or ProfileSettings(), cache or ProfileCache()
    sweep = _Sweep({each.name: each for each in subjects}, graph, backend, settings, cache, progress)
    with preserved(model, alone=subjects):
        return sweep.run(chosen, sorted_degrees, network)


@dataclass
class _Sweep:
    """One profiling run."""

    subjects: Mapping[str, Subject]
    graph: ModuleGraph
    backend: Backend
    settings: ProfileSettings
    cache: ProfileCache
    progress: ProgressCallback | None
    lanes: Lanes = field(init=False)
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    """Without communication, by module and degree."""
    memory: dict[str, ModuleMemory] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    num_done: int = 0
    num_expected: int = 0
    warm: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        environment, limit_s = environment_of(self.backend), self.settings.max_seconds
        self.keys = {name: key_of(subject, self.backend, environment) for name, subject in self.subjects.items()}
        self.retries = Retries(self.settings, self.backend.device)
        self.began = now_utc()
        self.ends_s = math.inf if limit_s is None else monotonic() + limit_s

    def run(self, quotas: tuple[int, ...], degrees: tuple[int, ...], network: Network | None) -> Profile:
        half, all_slots = self.backend.device.num_slots // 2, tuple(range(self.backend.device.num_slots))
        halves = (all_slots[:half], all_slots[half:])
        beside = [
            names
            for names in itertools.combinations(self.graph.names, 2)
            if self.settings.pairs and half and self.graph.independent(*names)
        ]
        self.num_expected = len(self.subjects) * len(degrees) * len(quotas) + len(beside)
        partitions = [all_slots[:quota] for quota in quotas] + [slots for _ in beside for slots in halves]
        with self.backend.open_lanes(partitions) as self.lanes:
            turns = deque(self._measure_module(name, quotas, degrees) for name in self.subjects)
            while turns:  # one point per module in turn, so a deadline affects all equally
                if next(turn := turns.popleft(), None) is not None:
                    turns.append(turn)
            pairs = tuple(sample for names in beside for sample in self._measure_pair(names, halves))
            lane_bytes = _LANE_BYTES if self.lanes.streams is not None else 0
        samples = tuple(
            self._composed(sample, network)
            for name in self.subjects
            for degree in degrees
            for sample in sorted(self.samples[name, degree], key=lambda sample: sample.quota)
        )
        if self.left_out:
            seconds = self.settings.max_seconds
            _LOG.warning("profiling reached its limit of %s s; not measured: %s", seconds, "; ".join(self.left_out))
        if note := self.retries.note:
            _LOG.warning("while the modules were profiled, %s", note)
        return Profile(
            device=self.backend.device,
            graph=self.graph,
            samples=samples,
            pairs=pairs,
            memory=tuple(dataclasses.replace(self.memory[name], lane_bytes=lane_bytes) for name in self.subjects),
            structures=structures_of(self.subjects.values()),
            left_out=tuple(self.left_out),
            environment=environment_of(
                self.backend, foreign_cpu_share=self.retries.taken.share or 0.0, began=self.began
            ),
        )

    def _measure_module(self, name: str, quotas: tuple[int, ...], degrees: tuple[int, ...]) -> Iterator[int]:
        """Measures missing points, caches each at once, and yields its quota, so that modules can take turns."""
        subject, activation_bytes = self.subjects[name], 0
        memory = self.cache.record(self.keys[name]).memory
        if memory is None:
            self._warm_up(subject)
            with attempt():  # if it fails on all slots, only its weights count
                activation_bytes = self.lanes.lane(tuple(range(quotas[-1]))).submit(subject.activation_bytes).wait()
            parameters = list(subject.module.parameters())
            weight_bytes = sum(tensor.nbytes for tensor in (*parameters, *subject.module.buffers()))
            memory = ModuleMemory(
                module=name,
                resident_bytes=weight_bytes + subject.gradient_bytes,
                activation_bytes=activation_bytes,
                num_trained=sum(p.numel() for p in parameters if p.requires_grad),
            )
            self.cache.add(ModuleRecord(key=self.keys[name], memory=memory))
        self.memory[name] = dataclasses.replace(memory, module=name)
        for degree in degrees:
            samples = self.samples[name, degree] = []
            yield from self._measure_degree(name, degree, quotas, samples)
            reasons = [sample.infeasible for sample in samples]
            if degree == 1 and None not in reasons:
                what = f"{name!r} failed at every quota with {reasons[0]}; fix it, use a smaller batch, or exclude it"
                if all(str(reason).startswith(_OUT_OF_MEMORY) for reason in reasons):
                    raise UnstableMeasurementError(what)
                raise ModuleFailedError(what, module=name, raised=str(reasons[0]))

    def _measure_degree(self, name: str, degree: int, quotas: tuple[int, ...], samples: list[Sample]) -> Iterator[int]:
        """Adds to ``samples``. After the deadline, the two end quotas on one device are enough."""
        try:
            part = split_batch(self.subjects[name], degree)
        except UnsupportedModelError as error:
            samples += [sample for quota in quotas for sample in _infeasible(name, degree, quota, str(error))]
            return
        left_out: list[int] = []
        # both ends first because nothing is extrapolated, then from large to small
        for index, quota in enumerate((quotas[-1], *quotas[:-1][:1], *reversed(quotas[1:-1]))):
            if cached := self._cached(name, degree, quota):
                samples += cached
                continue
            ran = {sample.quota for sample in samples if sample.infeasible is None}
            if (degree > 1 or (index > 1 and len(ran) > 1)) and monotonic() >= self.ends_s:
                left_out.append(quota)
                continue
            self._begin(_point(name, (quota,), degree), part, degree=degree)
            samples += self._measure_point(part, degree, quota)
            yield quota
        if left_out:
            self.left_out.append(_point(name, left_out, degree))

    def _cached(self, name: str, degree: int, quota: int) -> tuple[Sample, ...]:
        """Returns cached samples of a point, perhaps of an equal module."""
        samples = tuple(
            dataclasses.replace(sample, module=name)
            for sample in self.cache.record(self.keys[name]).samples
            if (sample.degree, sample.quota) == (degree, quota)
        )
        is_good = all(len(sample.times_ms) >= self.settings.min_repeats for sample in samples)
        return samples if is_good else ()

    def _measure_point(self, part: Subject, degree: int, quota: int) -> tuple[Sample, ...]:
        """Returns a sample per phase; caches them unless the module failed or other processes used the CPU."""
        lane, device = self.lanes.lane(tuple(range(quota))), self.backend.device
        if self.lanes.streams is not None:  # workspaces of earlier lanes
            self.lanes.streams.api.release_workspaces()
        with attempt() as tried:
            times, share = self.retries.quietest(lambda: measure(part, lane, self.settings))
            peaks = lane.submit(partial(part.peak_bytes, self.backend.torch_device)).wait()
        if tried.reason is not None:
            return _infeasible(part.name, degree, quota, tried.reason)
        samples = tuple(
            Sample(
                module=part.name,
                phase=phase,
                quota=quota,
                degree=degree,
                times_ms=times[phase],
                peak_bytes=most,
                measured=now_utc(),
            )
            for phase, most in zip(Phase, peaks, strict=True)
        )
        if device.kind != "host" or (share or 0.0) <= self.settings.foreign_share:
            self.cache.add(ModuleRecord(key=self.keys[part.name], samples=samples))
        return samples

    def _measure_pair(self, names: tuple[str, ...], halves: Sequence[tuple[int, ...]]) -> tuple[PairSample, ...]:
        """Returns two samples per phase of two modules; none, with a log message, if they fail."""
        quotas = {name: len(slots) for name, slots in zip(names, halves, strict=True)}
        cached = self.cache.pair(self.keys, quotas)
        if min((len(pair.alone_ms) for pair in cached), default=0) >= self.settings.min_repeats:
            return cached
        if monotonic() >= self.ends_s:
            self.left_out.append(" beside ".join(names))
            return cached
        subjects, lanes = [self.subjects[name] for name in names], [self.lanes.lane(slots) for slots in halves]
        self._begin(" beside ".join(names), *subjects)
        inline, device = self.lanes.launches_inline, self.backend.torch_device
        with attempt() as tried:
            times = {
                phase: measure_beside(subjects, lanes, phase, self.settings, inline=inline, device=device)
                for phase in Phase
            }
        if tried.reason is not None:
            _LOG.warning("%s were not measured side by side: %s", " and ".join(names), tried.reason)
            return ()
        pairs = tuple(
            PairSample(
                module=name,
                beside=other,
                phase=phase,
                quota=quotas[name],
                beside_quota=quotas[other],
                times_ms=own[mine].beside_ms,
                alone_ms=own[mine].alone_ms,
            )
            for mine, (name, other) in enumerate((names, names[::-1]))
            for phase, own in times.items()
            if own
        )
        self.cache.add_pairs(self.keys, pairs)
        return pairs

    def _composed(self, sample: Sample, network: Network | None) -> Sample:
        """Composes a degree's sample from its measured compute; gradient reduction does not overlap."""
        if sample.degree == 1 or network is None:
            return sample
        reduce_ms = 0.0
        if sample.phase is Phase.BACKWARD:
            reduce_ms = network.all_reduce_ms(self.subjects[sample.module].gradient_bytes, sample.degree)
        times = tuple(time + reduce_ms for time in sample.times_ms)
        return dataclasses.replace(sample, times_ms=times)

    def _begin(self, point: str, *subjects: Subject, degree: int = 1) -> None:
        """Reports the next measurement."""
        if self.progress is not None:
            self.progress(point, self.num_done, max(self.num_expected, self.num_done + 1))
        self.num_done += 1
        for subject in subjects:  # a cached subject has not run yet
            self._warm_up(subject, degree)

    def _warm_up(self, subject: Subject, degree: int = 1) -> None:
        """Lets libraries choose kernels on the whole device, once per module and degree."""
        if self.lanes.launches_inline and (subject.name, degree) not in self.warm:
            self.warm.add((subject.name, degree))
            with attempt():
                subject.backward(subject.forward())


class Attempt:
    """Catches the error of a block and keeps it as one line."""

    reason: str | None = None


@contextmanager
def attempt() -> Iterator[Attempt]:
    """Keeps the block's error as a reason and releases its frames; interrupts are raised."""
    outcome, is_memory = Attempt(), False
    try:
        yield outcome
    except Exception as error:  # a user's module may raise anything
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = _OUT_OF_MEMORY if is_memory else type(error).__name__
        outcome.reason = f"{kind}: {lines[0][:_MAX_CHARACTERS]}" if lines else kind
        if is_memory:  # the error's frames hold tensors
            traceback.clear_frames(error.__traceback__)
    if is_memory:
        gc.collect()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _point(module: str, quotas: Sequence[int], degree: int) -> str:
    slots = f"{', '.join(map(str, quotas))} slot{'s' if quotas[-1] > 1 else ''}"
    return f"{module} at {slots}" + (f" of {degree}" if degree > 1 else "")


def _infeasible(module: str, degree: int, quota: int, reason: str) -> tuple[Sample, ...]:
    return tuple(Sample(module=module, phase=phase, quota=quota, degree=degree, infeasible=reason) for phase in Phase)


def now_utc() -> str:
    """Returns the time as ISO 8601 in UTC, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment_of(backend: Backend, *, foreign_cpu_share: float = 0.0, began: str = "") -> Environment:
    """Returns a backend's machine and software."""
    driver_version = driver = ""
    if backend.torch_device.type == "cuda":
        driver_version = describe_driver().version
        with suppress(BackendUnavailableError):
            driver = describe_nvml().driver_version
    return Environment(
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        driver_version=driver_version,
        driver=driver,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        began=began,
        foreign_cpu_share=round(foreign_cpu_share, 4),
    )
