"""Profiling a whole graph: each module alone at every degree and quota, then modules side by side."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import statistics
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import torch
from torch import nn

from mosaic.backends.base import Backend, Lane, Lanes
from mosaic.errors import UnstableMeasurementError, UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.profile import ModuleMemory, PairSample, Phase, Profile, Sample
from mosaic.profiler.cache import MeasuredPoint, ModuleRecord, ProfileCache
from mosaic.profiler.communication import Network
from mosaic.profiler.counters import Counters, measure_utilisation
from mosaic.profiler.identity import environment_of, key_of, now_utc, structures_of
from mosaic.profiler.noise import Retries
from mosaic.profiler.settings import ProfileSettings, QuotaChoice, choose_quotas
from mosaic.profiler.subject import Subject, split_batch
from mosaic.profiler.timing import measure, measure_beside

_LOG = logging.getLogger("mosaic")
_OUT_OF_MEMORY = "out of memory"
_MAX_CHARACTERS = 300

ProgressCallback = Callable[[str, int, int], None]
"""Called with the next measurement, the number of measurements done, and about how many there are."""


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
    counters: Counters | None = None,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measures every module of a graph on a backend; the model is left as it was found.

    Where a module fails at one degree and quota, or runs out of memory, that point is kept as infeasible with what it
    raised, and the rest goes on. Modules take turns: first the largest and the smallest quota of each, then the others
    from large to small, then modules side by side; ``settings.max_seconds`` may end this early. What is measured on the
    host while other processes take the CPU is measured again, within ``settings.retry_seconds``; the profile has the
    share that they took while what was kept was measured.

    Args:
        model: The model that the modules belong to.
        subjects: Its modules with their inputs, in any order.
        graph: Which feeds which; pairs that depend on each other are not measured side by side.
        backend: Where to measure.
        quotas: Quotas in slots, or a choice of them; by default the slots nearest to tenths of the device.
        degrees: Data-parallel degrees; those between them are interpolated. Above 1 they are composed: one replica's
            share of the batch is timed here, and the sum of the gradients over ``network`` is added to its backward.
        network: Links between devices, such as a ``mosaic.hardware.Cluster``.
        cache: Where measurements are kept as they are made, and found again by a later or a resumed run.
        counters: Of the backend's GPU; without, occupancy and bandwidth stay unknown.
        settings: How carefully; the defaults take a few seconds a module.
        progress: Told what is being measured.

    Raises:
        InvalidPlanError: A quota is below one slot or above the device.
        ValueError: A degree is below 1, or above 1 without a network.
        UnsupportedModelError: A module fails wherever it is run; has its name and what it raised.
        UnstableMeasurementError: Other processes used the CPU, and ``settings`` are strict; or memory ran out.
    """
    chosen, wanted = choose_quotas(quotas, backend.device), tuple(sorted({1, *degrees}))
    if wanted[0] < 1:
        raise ValueError(f"degrees {wanted}; use degrees from 1 on")
    if len(wanted) > 1 and network is None:
        raise ValueError(f"degrees {wanted} need communication; give network, such as a Cluster or a Link")
    by_name = {subject.name: subject for subject in subjects}
    settings, cache = settings or ProfileSettings(), cache or ProfileCache()
    sweep = _Sweep(by_name, graph, backend, settings, cache, counters, progress)
    with preserved(model, alone=subjects, elsewhere=True):
        return sweep.run(chosen, wanted, network)


@dataclass
class _Sweep:
    """One profiling run."""

    subjects: Mapping[str, Subject]
    graph: ModuleGraph
    backend: Backend
    settings: ProfileSettings
    cache: ProfileCache
    counters: Counters | None
    progress: ProgressCallback | None
    lanes: Lanes = field(init=False)
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    """Compute alone, by module and degree."""
    memory: dict[str, ModuleMemory] = field(default_factory=dict)
    clocks_mhz: list[tuple[int, int]] = field(default_factory=list)
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
            while turns:  # one point each: a deadline leaves out as much of each
                if next(turn := turns.popleft(), None) is not None:
                    turns.append(turn)
            pairs = tuple(sample for names in beside for sample in self._measure_pair(names, halves))
            lane_bytes = round(statistics.median(self.lanes.measure_memory() or [0]))  # of libraries, on a GPU
        samples = tuple(
            self._composed(sample, network)
            for name in self.subjects
            for degree in degrees
            for sample in sorted(self.samples[name, degree], key=lambda sample: sample.quota)
        )
        if self.left_out:
            seconds = self.settings.max_seconds
            _LOG.warning("profiling was over after %s s; not measured: %s", seconds, "; ".join(self.left_out))
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
                self.backend,
                foreign_cpu_share=self.retries.taken.share or 0.0,
                clocks_mhz=self.clocks_mhz,
                began=self.began,
            ),
        )

    def _measure_module(self, name: str, quotas: tuple[int, ...], degrees: tuple[int, ...]) -> Iterator[int]:
        """Measures what is missing, keeps each point at once, and yields its quota, so that modules can take turns.

        Raises:
            UnsupportedModelError: The module ran at no quota of degree 1; has what it raised.
            UnstableMeasurementError: Memory ran out at each quota.
        """
        subject, activation_bytes = self.subjects[name], 0
        memory = self.cache.module(self.keys[name], name).memory
        if memory is None:
            self._warm_up(subject)
            with attempt():  # its own size alone where it fails on the most slots
                activation_bytes = self._lane(quotas[-1]).submit(subject.activation_bytes).wait()
            memory = ModuleMemory(
                module=name,
                resident_bytes=subject.resident_bytes,
                activation_bytes=activation_bytes,
                num_trained=subject.num_trained,
            )
            self.cache.add_module(self.keys[name], (), memory)
        self.memory[name] = memory
        for degree in degrees:
            samples = self.samples[name, degree] = []
            yield from self._measure_degree(name, degree, quotas, samples)
            reasons = [sample.infeasible for sample in samples]
            if degree == 1 and None not in reasons:
                is_memory = all(str(reason).startswith(_OUT_OF_MEMORY) for reason in reasons)
                raise (UnstableMeasurementError if is_memory else UnsupportedModelError)(
                    f"{name!r} ran at no quota; it raised {reasons[0]}. Mend the module, make the batch "
                    "smaller, or leave it out (exclude)"
                )

    def _measure_degree(self, name: str, degree: int, quotas: tuple[int, ...], samples: list[Sample]) -> Iterator[int]:
        """Adds to ``samples``. Once the deadline is over, two quotas on one device are enough: both ends that ran."""
        try:
            part = split_batch(self.subjects[name], degree)
        except UnsupportedModelError as error:
            samples += [sample for quota in quotas for sample in _infeasible(name, degree, quota, str(error))]
            return
        record = self.cache.module(self.keys[name], name)
        samples += [sample for quota in quotas for sample in self._reusable(record, degree, quota)]
        # The ends, outside of which nothing is predicted, then from large to small.
        order = (quotas[-1], *quotas[:-1][:1], *reversed(quotas[1:-1]))
        while missing := tuple(quota for quota in order if all(sample.quota != quota for sample in samples)):
            quota = missing[0]
            # Of an equal module, measured meanwhile.
            if points := self._reusable(self.cache.module(self.keys[name], name), degree, quota):
                samples += points
                continue
            ran = {sample.quota for sample in samples if sample.infeasible is None}
            is_enough = {quotas[0], quotas[-1]}.isdisjoint(missing) and len(ran) > 1
            if (degree > 1 or is_enough) and self._leaves_out(_point(name, missing, degree)):
                return
            self._begin(_point(name, (quota,), degree), part, degree=degree)
            samples += self._measure_point(part, degree, quota)
            yield quota

    def _reusable(self, record: ModuleRecord, degree: int, quota: int) -> tuple[Sample, ...]:
        """Known samples of a point that this run would take. Failed points are tried again: memory may be free."""
        settings, measured = self.settings, record.at(degree, quota)
        limit = settings.foreign_share if self.backend.device.kind == "host" else 1.0
        if measured is None or (measured.foreign_cpu_share or 0.0) > limit:
            return ()
        wants_counters = self.counters is not None and not self.counters.missing
        is_good = all(
            len(s.times_ms) >= settings.min_repeats
            and (not wants_counters or s.bandwidth_utilisation is not None or not any(s.times_ms))
            for s in measured.samples
        )
        return measured.samples if is_good else ()

    def _measure_point(self, part: Subject, degree: int, quota: int) -> tuple[Sample, ...]:
        lane, device, share = self._lane(quota), self.backend.device, None
        if self.lanes.streams is not None:  # what cuBLAS keeps for the lanes that were measured before is of no use
            self.lanes.streams.api.release_workspaces()
        with attempt() as tried:
            times, share = self.retries.quietest(lambda: measure(part, lane, self.settings))
            if self.counters is not None:
                self.clocks_mhz.append(self.counters.clocks_mhz)
            seen = [measure_utilisation(part, lane, phase, self.counters, device, times[phase]) for phase in Phase]
            peaks = lane.submit(partial(part.peak_bytes, self.backend.torch_device)).wait()
        if tried.reason is not None:
            samples = _infeasible(part.name, degree, quota, tried.reason, now_utc())
        else:
            measured = now_utc()
            samples = tuple(
                Sample(
                    module=part.name,
                    phase=phase,
                    quota=quota,
                    degree=degree,
                    times_ms=times[phase],
                    peak_bytes=most,
                    bandwidth_utilisation=used.dram_bandwidth,
                    sm_occupancy=used.sm_occupancy,
                    measured=measured,
                )
                for phase, used, most in zip(Phase, seen, peaks, strict=True)
            )
        point = MeasuredPoint(samples=samples, foreign_cpu_share=share)
        self.cache.add_module(self.keys[part.name], (point,), self.memory[part.name])
        return samples

    def _measure_pair(self, names: tuple[str, ...], halves: Sequence[tuple[int, ...]]) -> tuple[PairSample, ...]:
        """Returns two samples for each phase of two modules; none where they fail, which is logged."""
        quotas = {name: len(slots) for name, slots in zip(names, halves, strict=True)}
        cached = self.cache.pair(self.keys, quotas)
        if min((len(pair.alone_ms) for pair in cached), default=0) >= self.settings.min_repeats:
            return cached
        if self._leaves_out(" beside ".join(names)):
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
        """Returns a degree's sample from its measured compute: backward also sums the gradients, hidden by nothing."""
        if sample.degree == 1 or network is None:
            return sample
        reduce_ms = 0.0
        if sample.phase is Phase.BACKWARD:
            reduce_ms = network.all_reduce_ms(self.subjects[sample.module].gradient_bytes, sample.degree)
        times = tuple(time + reduce_ms for time in sample.times_ms)
        return dataclasses.replace(sample, times_ms=times, source="composed")

    def _lane(self, quota: int) -> Lane:
        return self.lanes.lane(tuple(range(quota)))

    def _leaves_out(self, point: str) -> bool:
        """Returns True if the time is over, and then notes the measurement."""
        is_over = monotonic() >= self.ends_s
        if is_over:
            self.left_out.append(point)
        return is_over

    def _begin(self, point: str, *subjects: Subject, degree: int = 1) -> None:
        """Reports the next measurement."""
        if self.progress is not None:
            self.progress(point, self.num_done, max(self.num_expected, self.num_done + 1))
        self.num_done += 1
        for subject in subjects:  # those that came from the cache have not run yet
            self._warm_up(subject, degree)

    def _warm_up(self, subject: Subject, degree: int = 1) -> None:
        """Lets libraries set themselves up and choose kernels on the whole device, once a module and degree."""
        if self.lanes.launches_inline and (subject.name, degree) not in self.warm:
            self.warm.add((subject.name, degree))
            with attempt():
                subject.backward(subject.forward())


class Attempt:
    """The outcome of a block that may fail."""

    reason: str | None = None
    """The error in one line."""


@contextmanager
def attempt() -> Iterator[Attempt]:
    """Keeps what the block raises as a reason and releases what it held; interrupts go on as errors."""
    outcome = Attempt()
    is_memory = False
    try:
        yield outcome
    except Exception as error:  # of any kind: the user's module raised it
        is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = _OUT_OF_MEMORY if is_memory else type(error).__name__
        outcome.reason = f"{kind}: {lines[0][:_MAX_CHARACTERS]}" if lines else kind
        if is_memory:  # whoever called this still holds the error, and it the tensors of the frames that it passed
            traceback.clear_frames(error.__traceback__)
    if is_memory:
        gc.collect()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _point(module: str, quotas: Sequence[int], degree: int) -> str:
    slots = f"{', '.join(map(str, quotas))} slot{'s' if quotas[-1] > 1 else ''}"
    return f"{module} at {slots}" + (f" of {degree}" if degree > 1 else "")


def _infeasible(module: str, degree: int, quota: int, reason: str, measured: str = "") -> tuple[Sample, ...]:
    return tuple(
        Sample(module=module, phase=phase, quota=quota, degree=degree, infeasible=reason, measured=measured)
        for phase in Phase
    )
