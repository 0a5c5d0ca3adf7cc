"""Profiling a whole graph: each module alone at every degree and quota, then modules side by side."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from mosaic.backends.base import Backend
from mosaic.cost.surfaces import held_out_errors
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.profile import HeldOutError, Phase, Profile, Sample
from mosaic.profiler.cache import KeepsMeasurements
from mosaic.profiler.machine.communication import Network
from mosaic.profiler.machine.counters import Counters
from mosaic.profiler.measuring.measure import Retries
from mosaic.profiler.measuring.pairs import Pairs, choose_pairs
from mosaic.profiler.measuring.peaks import lane_bytes_of
from mosaic.profiler.measuring.points import MeasuringSite, ModulePoints
from mosaic.profiler.quotas import QuotaChoice, Sampling
from mosaic.profiler.settings import Deadline, ProfileSettings
from mosaic.profiler.structure import structures_of
from mosaic.profiler.subject import Subject
from mosaic.profiler.surroundings import environment_of, key_of, now_utc

_LOG = logging.getLogger("mosaic")

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is measured next, how many measurements are done, and about how many there are."""


def profile_modules(
    model: nn.Module,
    subjects: Sequence[Subject],
    graph: ModuleGraph,
    backend: Backend,
    *,
    quotas: Iterable[int] | QuotaChoice | None = None,
    degrees: Iterable[int] = (1,),
    network: Network | None = None,
    cache: KeepsMeasurements | None = None,
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
    if quotas is None:
        quotas = "tenths"
    settings = settings or ProfileSettings()
    sampling = Sampling.choose(quotas, degrees, backend.device)
    if len(sampling.degrees) > 1 and network is None:
        raise ValueError(f"degrees {sampling.degrees} need communication; give network, such as a Cluster or a Ring")
    with preserved(model, alone=subjects, elsewhere=True):
        return _Sweep(subjects, graph, backend, settings, cache, counters, progress).run(sampling, network)


class _Sweep:
    """One profiling run."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        graph: ModuleGraph,
        backend: Backend,
        settings: ProfileSettings,
        cache: KeepsMeasurements | None,
        counters: Counters | None,
        progress: ProgressCallback | None,
    ) -> None:
        self._subjects, self._graph, self._backend = subjects, graph, backend
        self._settings, self._cache, self._counters = settings, cache, counters
        self._retries = Retries(settings, backend.device)
        self._began = now_utc()
        now = environment_of(backend)
        self._keys = {subject.name: key_of(subject, backend, now) for subject in subjects}
        self._steps = _Steps(progress)
        self._deadline = Deadline(settings.max_seconds)
        self._clocks: list[tuple[int, int]] = []

    def run(self, sampling: Sampling, network: Network | None) -> Profile:
        pairs = choose_pairs(self._graph, self._backend.device) if self._settings.pairs else []
        self._steps.expected = len(self._subjects) * sampling.expected + len(pairs)
        partitions = [tuple(range(quota)) for quota in sampling.quotas]
        with self._site([*partitions, *(slots for pair in pairs for _, slots in pair)]) as site:
            modules = [
                ModulePoints(subject, self._keys[subject.name], site, self._steps.next) for subject in self._subjects
            ]
            _take_turns(points.measure(sampling) for points in modules)
            memory = [points.memory(sampling.quotas[-1]) for points in modules]
            by_name = {subject.name: subject for subject in self._subjects}
            measured = tuple(Pairs(site, by_name, self._keys, self._steps.next).measured(pairs))
            lane_bytes = lane_bytes_of(site.lanes)
        memory = [dataclasses.replace(kept, lane_bytes=lane_bytes) for kept in memory]
        samples = [sample for points in modules for sample in points.samples(network)]
        if self._deadline.left_out:
            _LOG.warning(
                "profiling was over after %s s; not measured: %s",
                self._settings.max_seconds,
                "; ".join(self._deadline.left_out),
            )
        if note := self._retries.note:
            _LOG.warning("while the modules were profiled, %s", note)
        return Profile(
            device=self._backend.device,
            graph=self._graph,
            samples=tuple(samples),
            pairs=measured,
            memory=tuple(memory),
            structures=structures_of(self._subjects),
            held_out=held_out_of(samples),
            left_out=tuple(self._deadline.left_out),
            environment=environment_of(
                self._backend,
                foreign_cpu_share=self._retries.taken.share or 0.0,
                clocks_mhz=self._clocks,
                began=self._began,
            ),
        )

    @contextmanager
    def _site(self, partitions: Iterable[tuple[int, ...]]) -> Iterator[MeasuringSite]:
        with self._backend.open_lanes(partitions) as lanes:
            yield MeasuringSite(
                lanes,
                self._backend.device,
                self._backend.torch_device,
                self._settings,
                self._retries,
                self._counters,
                self._cache,
                self._clocks,
                self._deadline,
            )


def _take_turns(modules: Iterable[Iterator[int]]) -> None:
    """Lets each module measure one point after the other's, so that a deadline leaves out as much of each."""
    waiting = deque(modules)
    while waiting:
        module = waiting.popleft()
        if next(module, None) is not None:
            waiting.append(module)


def held_out_of(samples: Sequence[Sample]) -> tuple[HeldOutError, ...]:
    """Returns how well the samples of each module and phase predict each other, where there are enough."""
    by_subject: dict[tuple[str, Phase], list[Sample]] = {}
    for sample in samples:
        if sample.infeasible is None:
            by_subject.setdefault((sample.module, sample.phase), []).append(sample)
    errors = (held_out_errors(group) for group in by_subject.values())
    return tuple(error for error in errors if error is not None)


class _Steps:
    """Tells how far a run is."""

    def __init__(self, progress: ProgressCallback | None) -> None:
        self.expected = 0
        self._done = 0
        self._progress = progress

    def next(self, what: str) -> None:
        self.expected = max(self.expected, self._done + 1)
        if self._progress is not None:
            self._progress(what, self._done, self.expected)
        self._done += 1
