"""Profiling a whole graph: each module alone at every degree and quota, then modules side by side."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic

from torch import nn

from mosaic.backends.base import Backend, Lane, Lanes
from mosaic.cost.surfaces import held_out_errors
from mosaic.device import Device
from mosaic.errors import UnstableMeasurementError, UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.profile import HeldOutError, ModuleMemory, PairSample, Phase, Profile, Sample
from mosaic.profiler.cache import MeasuredPoint, ModuleRecord, PairKey, ProfileCache
from mosaic.profiler.communication import Network
from mosaic.profiler.counters import Counters, Utilisation, measure_utilisation
from mosaic.profiler.identity import environment_of, key_of, now_utc, structures_of
from mosaic.profiler.measure import OUT_OF_MEMORY, Retries, attempt, measure, phase_peaks
from mosaic.profiler.settings import ProfileSettings, QuotaChoice, choose_quotas
from mosaic.profiler.subject import Subject, split_batch
from mosaic.profiler.together import measure_beside

_LOG = logging.getLogger("mosaic")

ProgressCallback = Callable[[str, int, int], None]
"""Called with the next measurement, the number of measurements done, and about how many there are."""

Layout = tuple[tuple[str, tuple[int, ...]], ...]
"""Modules and the slots that each has, no slot twice."""


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
    sweep = _Sweep(subjects, backend, settings or ProfileSettings(), cache or ProfileCache(), counters, progress)
    with preserved(model, alone=subjects, elsewhere=True):
        return sweep.run(graph, chosen, wanted, network)


class _Sweep:
    """One profiling run."""

    lanes: Lanes

    def __init__(
        self,
        subjects: Sequence[Subject],
        backend: Backend,
        settings: ProfileSettings,
        cache: ProfileCache,
        counters: Counters | None,
        progress: ProgressCallback | None,
    ) -> None:
        self.backend, self.settings, self.cache, self.counters = backend, settings, cache, counters
        self.retries = Retries(settings, backend.device)
        self.clocks_mhz: list[tuple[int, int]] = []
        self.subjects = {subject.name: subject for subject in subjects}
        environment = environment_of(backend)
        self.keys = {subject.name: key_of(subject, backend, environment) for subject in subjects}
        self._began = now_utc()
        self._deadline = None if settings.max_seconds is None else monotonic() + settings.max_seconds
        self._left_out: list[str] = []
        self._progress = progress
        self._num_done = self._num_expected = 0
        self._warm: set[tuple[str, int]] = set()

    def run(
        self, graph: ModuleGraph, quotas: tuple[int, ...], degrees: tuple[int, ...], network: Network | None
    ) -> Profile:
        layouts = choose_pairs(graph, self.backend.device) if self.settings.pairs else []
        self._num_expected = len(self.subjects) * len(degrees) * len(quotas) + len(layouts)
        partitions = [tuple(range(quota)) for quota in quotas] + [slots for pair in layouts for _, slots in pair]
        with self.backend.open_lanes(partitions) as self.lanes:
            modules = [_Module(self, subject, quotas, degrees) for subject in self.subjects.values()]
            turns = deque(module.measure() for module in modules)
            while turns:  # one point each: a deadline leaves out as much of each
                if next(turn := turns.popleft(), None) is not None:
                    turns.append(turn)
            memory = [module.memory() for module in modules]
            pairs = tuple(sample for layout in layouts for sample in self._measure_pair(layout))
            lane_bytes = round(statistics.median(self.lanes.measure_memory() or [0]))  # of libraries, on a GPU
        samples = tuple(sample for module in modules for sample in module.samples(network))
        if self._left_out:
            seconds = self.settings.max_seconds
            _LOG.warning("profiling was over after %s s; not measured: %s", seconds, "; ".join(self._left_out))
        if note := self.retries.note:
            _LOG.warning("while the modules were profiled, %s", note)
        return Profile(
            device=self.backend.device,
            graph=graph,
            samples=samples,
            pairs=pairs,
            memory=tuple(dataclasses.replace(entry, lane_bytes=lane_bytes) for entry in memory),
            structures=structures_of(tuple(self.subjects.values())),
            held_out=_held_out_of(samples),
            left_out=tuple(self._left_out),
            environment=environment_of(
                self.backend,
                foreign_cpu_share=self.retries.taken.share or 0.0,
                clocks_mhz=self.clocks_mhz,
                began=self._began,
            ),
        )

    def leaves_out(self, what: str) -> bool:
        """Returns True if the time is over, and then notes the measurement."""
        is_over = self._deadline is not None and monotonic() >= self._deadline
        if is_over:
            self._left_out.append(what)
        return is_over

    def report(self, what: str) -> None:
        """Reports the next measurement."""
        if self._progress is not None:
            self._progress(what, self._num_done, max(self._num_expected, self._num_done + 1))
        self._num_done += 1

    def warm_up(self, subject: Subject, degree: int = 1) -> None:
        """Lets libraries set themselves up and choose kernels on the whole device, once a module and degree."""
        if self.lanes.launches_inline and (subject.name, degree) not in self._warm:
            self._warm.add((subject.name, degree))
            with attempt():
                subject.backward(subject.forward())

    def _measure_pair(self, layout: Layout) -> tuple[PairSample, ...]:
        """Returns two samples for each phase of two modules; none where they fail, which is logged."""
        names, quotas = [name for name, _ in layout], tuple(len(slots) for _, slots in layout)
        key = PairKey(modules=tuple(self.keys[name] for name in names), quotas=quotas)
        known = self.cache.pair(key, names)
        if min((len(pair.alone_ms) for pair in known), default=0) >= self.settings.min_repeats:
            return known
        if self.leaves_out(" beside ".join(names)):
            return known
        self.report(" beside ".join(names))
        subjects, lanes = [self.subjects[name] for name in names], [self.lanes.lane(slots) for _, slots in layout]
        for subject in subjects:  # those that came from the cache have not run yet
            self.warm_up(subject)
        inline, device = self.lanes.launches_inline, self.backend.torch_device
        pairs: list[PairSample] = []
        with attempt() as tried:
            for phase in Phase:
                times = measure_beside(subjects, lanes, phase, self.settings, inline=inline, device=device)
                pairs += [
                    PairSample(
                        module=names[mine],
                        beside=names[1 - mine],
                        phase=phase,
                        quota=quotas[mine],
                        beside_quota=quotas[1 - mine],
                        times_ms=own.beside_ms,
                        alone_ms=own.alone_ms,
                    )
                    for mine, own in enumerate(times)
                ]
        if tried.reason is not None:
            _LOG.warning("%s were not measured side by side: %s", " and ".join(names), tried.reason)
        else:
            self.cache.add_pair(key, names, pairs)
        return tuple(pairs)


class _Module:
    """The measurements of one module."""

    def __init__(self, sweep: _Sweep, subject: Subject, quotas: tuple[int, ...], degrees: tuple[int, ...]) -> None:
        self._sweep, self._subject, self._quotas, self._degrees = sweep, subject, quotas, degrees
        self._key = sweep.keys[subject.name]
        self._memory: ModuleMemory | None = None
        self._computed: dict[int, list[Sample]] = {}

    def measure(self) -> Iterator[int]:
        """Measures what is missing, keeps each point at once, and yields its quota, so that modules can take turns.

        Once the deadline is over, two quotas on one device are enough: the largest and the smallest that ran.

        Raises:
            UnsupportedModelError: The module ran at no quota of degree 1; has what it raised.
            UnstableMeasurementError: Memory ran out at each quota.
        """
        for degree in self._degrees:
            samples = self._computed[degree] = []
            for quota in self._measure_degree(degree, samples):
                self.memory()  # kept from the first point on, for a run that is killed
                yield quota
            reasons = [sample.infeasible for sample in samples]
            if degree == 1 and None not in reasons:
                is_memory = all(str(reason).startswith(OUT_OF_MEMORY) for reason in reasons)
                raise (UnstableMeasurementError if is_memory else UnsupportedModelError)(
                    f"{self._subject.name!r} ran at no quota; it raised {reasons[0]}. Mend the module, make the batch "
                    "smaller, or leave it out (exclude)"
                )

    def samples(self, network: Network | None) -> list[Sample]:
        """Returns what was measured, by degree and quota; ``network`` has the links for degrees above 1."""
        return [
            self._composed(sample, network)
            for samples in self._computed.values()
            for sample in sorted(samples, key=lambda sample: sample.quota)
        ]

    def _composed(self, sample: Sample, network: Network | None) -> Sample:
        """Returns a degree's sample from its measured compute: backward also sums the gradients, hidden by nothing."""
        if sample.degree == 1 or network is None:
            return sample
        is_backward = sample.phase is Phase.BACKWARD
        reduce_ms = network.all_reduce_ms(self._subject.gradient_bytes, sample.degree) if is_backward else 0.0
        times = tuple(time + reduce_ms for time in sample.times_ms)
        return dataclasses.replace(sample, times_ms=times, source="composed")

    def memory(self) -> ModuleMemory:
        """Returns what the module keeps; its own size alone where it fails on the most slots."""
        subject, sweep = self._subject, self._sweep
        self._memory = self._memory or self._record().memory
        if self._memory is None:
            activation_bytes = 0
            with attempt():
                activation_bytes = self._lane(self._quotas[-1]).submit(subject.activation_bytes).wait()
            self._memory = ModuleMemory(
                module=subject.name,
                resident_bytes=subject.resident_bytes,
                activation_bytes=activation_bytes,
                num_trained=subject.num_trained,
            )
            sweep.cache.add_module(self._key, (), self._memory)
        return self._memory

    def _measure_degree(self, degree: int, samples: list[Sample]) -> Iterator[int]:
        name, sweep = self._subject.name, self._sweep
        try:
            part = split_batch(self._subject, degree)
        except UnsupportedModelError as error:
            samples += [_infeasible(name, phase, q, degree, str(error)) for q in self._quotas for phase in Phase]
            return
        record = self._record()
        samples += [sample for quota in self._quotas for sample in self._reusable(record, degree, quota)]
        *others, largest = self._quotas
        # The ends, outside of which nothing is predicted, then from large to small.
        order = (largest, *others[:1], *reversed(others[1:]))
        while missing := tuple(quota for quota in order if all(sample.quota != quota for sample in samples)):
            quota = missing[0]
            if points := self._reusable(self._record(), degree, quota):  # of an equal module, measured meanwhile
                samples += points
                continue
            ran = {sample.quota for sample in samples if sample.infeasible is None}
            is_enough = {self._quotas[0], largest}.isdisjoint(missing) and len(ran) > 1
            if (degree > 1 or is_enough) and sweep.leaves_out(_point(name, missing, degree)):
                return
            sweep.report(_point(name, (quota,), degree))
            sweep.warm_up(part, degree)
            samples += self._measure_point(part, degree, quota)
            yield quota

    def _record(self) -> ModuleRecord:
        return self._sweep.cache.module(self._key, self._subject.name)

    def _lane(self, quota: int) -> Lane:
        return self._sweep.lanes.lane(tuple(range(quota)))

    def _reusable(self, record: ModuleRecord, degree: int, quota: int) -> tuple[Sample, ...]:
        """Known samples of a point that this run would take. Failed points are tried again: memory may be free."""
        settings, counters, measured = self._sweep.settings, self._sweep.counters, record.at(degree, quota)
        limit = settings.foreign_share if self._sweep.backend.device.kind == "host" else 1.0
        if measured is None or (measured.foreign_cpu_share or 0.0) > limit:
            return ()
        wants_counters = counters is not None and not counters.missing
        is_good = all(
            len(s.times_ms) >= settings.min_repeats
            and (not wants_counters or s.bandwidth_utilisation is not None or not any(s.times_ms))
            for s in measured.samples
        )
        return measured.samples if is_good else ()

    def _measure_point(self, part: Subject, degree: int, quota: int) -> tuple[Sample, ...]:
        sweep, lane = self._sweep, self._lane(quota)
        if sweep.lanes.streams is not None:  # what cuBLAS keeps for the lanes that were measured before is of no use
            sweep.lanes.streams.api.release_workspaces()
        share = None
        with attempt() as tried:
            times, share = sweep.retries.quietest(lambda: measure(part, lane, sweep.settings))
            if sweep.counters is not None:
                sweep.clocks_mhz.append(sweep.counters.clocks_mhz)
            seen = {phase: self._utilisation(part, lane, phase, times[phase]) for phase in Phase}
            peaks = dict(zip(Phase, self._peaks(part, lane), strict=True))
        measured = now_utc()
        if tried.reason is not None:
            samples = tuple(_infeasible(part.name, phase, quota, degree, tried.reason, measured) for phase in Phase)
        else:
            samples = tuple(
                Sample(
                    module=part.name,
                    phase=phase,
                    quota=quota,
                    degree=degree,
                    times_ms=times[phase],
                    peak_bytes=peaks[phase],
                    bandwidth_utilisation=seen[phase].dram_bandwidth,
                    sm_occupancy=seen[phase].sm_occupancy,
                    measured=measured,
                )
                for phase in Phase
            )
        sweep.cache.add_module(self._key, (MeasuredPoint(samples=samples, foreign_cpu_share=share),), self._memory)
        return samples

    def _utilisation(self, part: Subject, lane: Lane, phase: Phase, times_ms: Sequence[float]) -> Utilisation:
        """Reads the counters while the phase runs on its partition; nothing is known where there are none."""
        counters = self._sweep.counters
        if counters is None or counters.missing or not any(times_ms):
            return Utilisation()
        call_ms, device = sum(times_ms) / len(times_ms), self._sweep.backend.device
        return measure_utilisation(part, lane, phase, counters, device, call_ms=call_ms) or Utilisation()

    def _peaks(self, part: Subject, lane: Lane) -> tuple[int, int]:
        """Most bytes in use in both phases; where no allocator counts them, what forward keeps."""
        device = self._sweep.backend.torch_device
        if device.type == "cuda":
            return lane.submit(partial(phase_peaks, part, device)).wait()
        activation_bytes = lane.submit(part.activation_bytes).wait()
        return activation_bytes, activation_bytes


def choose_pairs(graph: ModuleGraph, device: Device) -> list[Layout]:
    """Returns pairs that may share a stage, each on half of the device."""
    half = device.num_slots // 2
    pairs = itertools.combinations(graph.names, 2) if half else ()
    return [lay_out(pair, (half, device.num_slots - half)) for pair in pairs if graph.independent(*pair)]


def lay_out(modules: Sequence[str], quotas: Sequence[int]) -> Layout:
    """Returns modules with slots side by side, from slot 0 on."""
    starts = itertools.accumulate(quotas, initial=0)
    return tuple(
        (module, tuple(range(start, start + quota)))
        for module, quota, start in zip(modules, quotas, starts, strict=False)
    )


def _held_out_of(samples: Sequence[Sample]) -> tuple[HeldOutError, ...]:
    """Returns how well the samples of each module and phase predict each other, where there are enough."""
    by_phase: dict[tuple[str, Phase], list[Sample]] = {}
    for sample in samples:
        if sample.infeasible is None:
            by_phase.setdefault((sample.module, sample.phase), []).append(sample)
    return tuple(error for group in by_phase.values() if (error := held_out_errors(group)) is not None)


def _point(module: str, quotas: Sequence[int], degree: int) -> str:
    slots = f"{', '.join(map(str, quotas))} slot{'s' if quotas[-1] > 1 else ''}"
    return f"{module} at {slots}" + (f" of {degree}" if degree > 1 else "")


def _infeasible(module: str, phase: Phase, quota: int, degree: int, reason: str, measured: str = "") -> Sample:
    return Sample(module=module, phase=phase, quota=quota, degree=degree, infeasible=reason, measured=measured)
