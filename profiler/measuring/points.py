"""One module at every degree and quota that is asked for: what is known already, what has to run, what cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from mosaic.backends.base import Lane, Lanes
from mosaic.device import Device
from mosaic.errors import UnstableMeasurementError, UnsupportedModelError
from mosaic.profile import ModuleMemory, Phase, Sample
from mosaic.profiler.cache import KeepsMeasurements
from mosaic.profiler.machine.communication import Network
from mosaic.profiler.machine.counters import Counters, Utilisation
from mosaic.profiler.measuring.attempt import OUT_OF_MEMORY, attempt
from mosaic.profiler.measuring.batch import split_batch
from mosaic.profiler.measuring.measure import Retries, StepTimes, measure
from mosaic.profiler.measuring.peaks import phase_peaks
from mosaic.profiler.measuring.utilisation import measure_utilisation
from mosaic.profiler.quotas import Sampling
from mosaic.profiler.records import MeasuredPoint, ModuleKey, ModuleRecord
from mosaic.profiler.settings import Deadline, ProfileSettings
from mosaic.profiler.subject import Subject
from mosaic.profiler.surroundings import now_utc


@dataclass(frozen=True, slots=True)
class MeasuringSite:
    """Where and how modules are measured."""

    lanes: Lanes
    """Open for every quota from slot 0 on."""
    device: Device
    """What the lanes are on."""
    torch_device: torch.device
    """Where tensors live."""
    settings: ProfileSettings
    """How carefully."""
    retries: Retries
    """Measure again what others disturbed."""
    counters: Counters | None = None
    """Of the device, where they can be read."""
    cache: KeepsMeasurements | None = None
    """Where measurements are kept."""
    clocks_mhz: list[tuple[int, int]] = field(default_factory=list)
    """SM and memory clocks, read after each measurement."""
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    """When to stop."""
    warm: set[tuple[str, int]] = field(default_factory=set)
    """Modules and degrees whose libraries have set themselves up."""

    def warm_up(self, subject: Subject, degree: int = 1) -> None:
        """Lets libraries set themselves up and choose kernels on the whole device, once a module and degree."""
        if self.lanes.launches_inline and (subject.name, degree) not in self.warm:
            self.warm.add((subject.name, degree))
            with attempt():
                subject.backward(subject.forward())


class ModulePoints:
    """The measurements of one module."""

    def __init__(self, subject: Subject, key: ModuleKey, site: MeasuringSite, tell: Callable[[str], None]) -> None:
        """Looks up what is known; ``tell`` hears of each measurement before it is made."""
        self._subject = subject
        self._key = key
        self._site = site
        self._tell = tell
        self._record = self._known()
        self._memory: ModuleMemory | None = None
        self._computed: dict[int, list[Sample]] = {}

    def measure(self, sampling: Sampling) -> Iterator[int]:
        """Measures what is missing, keeps each point at once, and yields its quota, so that modules can take turns.

        Once the site's deadline is over, few quotas on one device are enough (``Sampling.is_enough``).

        Args:
            sampling: Which degrees and quotas.

        Raises:
            UnsupportedModelError: The module ran at no quota of degree 1; has what it raised.
            UnstableMeasurementError: Memory ran out at each quota.
        """
        for degree in sampling.degrees:
            found = self._computed[degree] = []
            for quota in self._measure_degree(degree, sampling, found):
                self.memory(sampling.quotas[-1])  # kept from the first point on, for a run that is killed
                yield quota
            reasons = [sample.infeasible for sample in found]
            if degree == 1 and None not in reasons:
                is_memory = all(str(reason).startswith(OUT_OF_MEMORY) for reason in reasons)
                raise (UnstableMeasurementError if is_memory else UnsupportedModelError)(
                    f"{self._subject.name!r} ran at no quota; it raised {reasons[0]}. Mend the module, make the batch "
                    "smaller, or leave it out (exclude)"
                )

    def samples(self, network: Network | None) -> list[Sample]:
        """Returns what was measured, by degree and quota; ``network`` has the links for degrees above 1."""
        return [
            compose(sample, network, self._subject.gradient_bytes)
            for found in self._computed.values()
            for sample in sorted(found, key=lambda sample: sample.quota)
        ]

    def _measure_degree(self, degree: int, sampling: Sampling, found: list[Sample]) -> Iterator[int]:
        name = self._subject.name
        try:
            part = split_batch(self._subject, degree)
        except UnsupportedModelError as error:
            found += [_infeasible(name, phase, q, degree, str(error)) for q in sampling.quotas for phase in Phase]
            return
        found += [sample for quota in sampling.quotas for sample in self._reusable(degree, quota)]
        while left := sampling.remaining(found):
            quota = left[0]
            self._record = self._known()  # an equal module may have been measured meanwhile
            if points := self._reusable(degree, quota):
                found += points
                continue
            is_enough = degree > 1 or sampling.is_enough(found)
            if is_enough and self._site.deadline.leaves_out(_point(name, left, degree)):
                return
            self._tell(_point(name, (quota,), degree))
            self._site.warm_up(part, degree)
            found += self._measure_point(part, degree, quota)
            yield quota

    def _known(self) -> ModuleRecord:
        cache = self._site.cache
        return ModuleRecord(key=self._key) if cache is None else cache.module(self._key, self._subject.name)

    def _reusable(self, degree: int, quota: int) -> tuple[Sample, ...]:
        """What is known of a point, if this run would have taken it. What failed is tried again: memory may be free."""
        settings, counters = self._site.settings, self._site.counters
        wants_counters = counters is not None and not counters.missing
        kept = self._record.at(degree, quota)
        limit = settings.foreign_share if self._site.device.kind == "host" else 1.0
        if kept is None or (kept.foreign_cpu_share or 0.0) > limit:
            return ()
        good = all(
            len(s.times_ms) >= settings.min_repeats
            and (not wants_counters or s.bandwidth_utilisation is not None or not any(s.times_ms))
            for s in kept.samples
        )
        return kept.samples if good else ()

    def _measure_point(self, part: Subject, degree: int, quota: int) -> tuple[Sample, ...]:
        site, lane = self._site, self._site.lanes.lane(tuple(range(quota)))
        if site.lanes.streams is not None:  # what cuBLAS keeps for the lanes that were measured before is of no use
            site.lanes.streams.api.release_workspaces()
        share = None
        with attempt() as tried:
            times, share = site.retries.quietest(lambda: measure(part, lane, site.settings))
            if site.counters is not None:
                site.clocks_mhz.append(site.counters.clocks_mhz)
            seen = {phase: self._look(part, lane, phase, times) for phase in Phase}
            peaks = dict(zip(Phase, self._peaks(part, lane), strict=True))
        if tried.reason is not None:
            samples = tuple(_infeasible(part.name, phase, quota, degree, tried.reason) for phase in Phase)
        else:
            samples = tuple(
                Sample(
                    module=part.name,
                    phase=phase,
                    quota=quota,
                    degree=degree,
                    times_ms=_of(times, phase),
                    peak_bytes=peaks[phase],
                    bandwidth_utilisation=seen[phase].dram_bandwidth,
                    sm_occupancy=seen[phase].sm_occupancy,
                )
                for phase in Phase
            )
        samples = tuple(dataclasses.replace(sample, measured=now_utc()) for sample in samples)
        if site.cache is not None:
            kept = MeasuredPoint(samples=samples, foreign_cpu_share=share)
            site.cache.add_module(self._key, (kept,), self._record.memory)
        return samples

    def _look(self, part: Subject, lane: Lane, phase: Phase, times: StepTimes) -> Utilisation:
        """Reads the counters while the phase runs on its partition; knows nothing where there are none."""
        site, values = self._site, _of(times, phase)
        if site.counters is None or site.counters.missing or not any(values):
            return Utilisation()
        call_ms = sum(values) / len(values)
        return measure_utilisation(part, lane, phase, site.counters, site.device, call_ms=call_ms) or Utilisation()

    def _peaks(self, part: Subject, lane: Lane) -> tuple[int, int]:
        """Most bytes in use in both phases; where no allocator counts them, what forward keeps."""
        if self._site.torch_device.type == "cuda":
            return lane.submit(partial(phase_peaks, part, self._site.torch_device)).wait()
        kept = lane.submit(part.activation_bytes).wait()
        return kept, kept

    def memory(self, quota: int) -> ModuleMemory:
        """Returns what the module keeps; its own size alone where it fails at ``quota``."""
        self._memory = self._memory or self._record.memory
        if self._memory is not None:
            return self._memory
        subject, site = self._subject, self._site
        kept = 0
        with attempt():
            kept = site.lanes.lane(tuple(range(quota))).submit(subject.activation_bytes).wait()
        self._memory = ModuleMemory(
            module=subject.name,
            resident_bytes=subject.resident_bytes,
            activation_bytes=kept,
            num_trained=subject.num_trained,
        )
        if site.cache is not None:
            site.cache.add_module(self._key, (), self._memory)
        return self._memory


def compose(sample: Sample, network: Network | None, gradient_bytes: int) -> Sample:
    """Returns a degree's sample from its measured compute: backward also sums the gradients, hidden by nothing.

    Raises:
        ValueError: There is no network to sum them over.
    """
    if sample.degree == 1:
        return sample
    if network is None:
        raise ValueError(f"degree {sample.degree} is composed of compute and communication; give a network")
    reduce_ms = network.all_reduce_ms(gradient_bytes, sample.degree) if sample.phase is Phase.BACKWARD else 0.0
    return dataclasses.replace(sample, times_ms=tuple(time + reduce_ms for time in sample.times_ms), source="composed")


def _of(times: StepTimes, phase: Phase) -> tuple[float, ...]:
    return times.forward_ms if phase is Phase.FORWARD else times.backward_ms


def _point(module: str, quotas: Sequence[int], degree: int) -> str:
    slots = f"{', '.join(map(str, quotas))} slot{'s' if quotas[-1] > 1 else ''}"
    return f"{module} at {slots}" + (f" of {degree}" if degree > 1 else "")


def _infeasible(module: str, phase: Phase, quota: int, degree: int, reason: str) -> Sample:
    return Sample(module=module, phase=phase, quota=quota, degree=degree, infeasible=reason)
