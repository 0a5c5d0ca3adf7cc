"""Profiling a whole graph: each module alone at every quota, then pairs that may run side by side."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import combinations

import torch
from torch import nn

from mosaic.backends.base import Backend, Lanes
from mosaic.backends.cuda import describe_driver, describe_nvml
from mosaic.device import Device
from mosaic.errors import BackendUnavailableError
from mosaic.graph import ModuleGraph
from mosaic.profile import Environment, ModuleMemory, PairSample, Phase, Profile, Sample
from mosaic.profiler.measure import measure_alone
from mosaic.profiler.noise import ForeignLoad
from mosaic.profiler.pairs import measure_pair
from mosaic.profiler.peaks import phase_peaks
from mosaic.profiler.preserve import preserved
from mosaic.profiler.settings import ProfileSettings
from mosaic.profiler.subject import Subject

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is measured next, how many measurements are done, and how many there are."""


def profile_modules(
    model: nn.Module,
    subjects: Sequence[Subject],
    graph: ModuleGraph,
    backend: Backend,
    *,
    quotas: Iterable[int] | None = None,
    settings: ProfileSettings | None = None,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measures every module of a graph on a backend; the model is left as it was found.

    Args:
        model: The model that the modules belong to.
        subjects: Its modules with their inputs, in any order.
        graph: Which feeds which; modules that depend on each other are not measured side by side.
        backend: Where to measure.
        quotas: Quotas in slots; by default the slots nearest to tenths of the device.
        settings: How carefully; the defaults take a few seconds a module.
        progress: Told what is being measured.

    Raises:
        InvalidPlanError: A quota is below one slot or above the device.
        UnstableMeasurementError: The machine is too busy to measure.
    """
    settings = settings or ProfileSettings()
    chosen = tuple(sorted(set(quotas))) if quotas is not None else default_quotas(backend.device)
    for quota in chosen:
        backend.device.check_quota(quota, of="profiling")
    pairs = _pairs(graph, backend.device) if settings.pairs else []
    steps = _Steps(len(subjects) * len(chosen) + len(pairs), progress)
    load = ForeignLoad()
    on_gpu = backend.torch_device.type == "cuda"
    by_name = {subject.name: subject for subject in subjects}
    partitions = [tuple(range(quota)) for quota in chosen] + [slots for *_, both in pairs for slots in both]
    with preserved(model), backend.open_lanes(partitions) as lanes:
        samples, memory = _measure_modules(subjects, chosen, lanes, settings, steps, backend.torch_device)
        measured: list[PairSample] = []
        for first, second, (mine, other) in pairs:
            steps.next(f"{first} beside {second}")
            both = (lanes.lane(mine), lanes.lane(other))
            for phase in Phase:
                measured += measure_pair(
                    by_name[first],
                    by_name[second],
                    both,
                    phase,
                    settings,
                    inline=lanes.launches_inline,
                    device=backend.torch_device,
                )
    return Profile(
        device=backend.device,
        graph=graph,
        samples=tuple(samples),
        pairs=tuple(measured),
        memory=tuple(memory),
        environment=Environment(
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            driver_version=describe_driver().version if on_gpu else "",
            driver=_driver_release() if on_gpu else "",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            foreign_cpu_share=round(load.share or 0.0, 4),
        ),
    )


def _driver_release() -> str:
    """Returns the kernel driver's release; empty where NVML does not answer."""
    try:
        return describe_nvml().driver_version
    except BackendUnavailableError:
        return ""


def default_quotas(device: Device) -> tuple[int, ...]:
    """Returns the slots nearest to tenths of a device, paper section 3.3; all of them up to ten slots."""
    count = device.num_slots
    return tuple(sorted({max(1, round(tenth * count / 10)) for tenth in range(1, 11)}))


class _Steps:
    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def next(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._done, self._total)
        self._done += 1


def _measure_modules(
    subjects: Sequence[Subject],
    quotas: Sequence[int],
    lanes: Lanes,
    settings: ProfileSettings,
    steps: _Steps,
    device: torch.device,
) -> tuple[list[Sample], list[ModuleMemory]]:
    samples: list[Sample] = []
    memory: list[ModuleMemory] = []
    for subject in subjects:
        if lanes.launches_inline:
            subject.backward(subject.forward())  # libraries set themselves up and choose kernels on the whole device
        widest = lanes.lane(tuple(range(quotas[-1])))
        kept = widest.submit(subject.activation_bytes).wait()
        peaks = widest.submit(partial(phase_peaks, subject, device)).wait() if device.type == "cuda" else (kept, kept)
        memory.append(ModuleMemory(module=subject.name, resident_bytes=subject.resident_bytes, activation_bytes=kept))
        for quota in quotas:
            steps.next(f"{subject.name} at {quota} slot{'s' if quota > 1 else ''}")
            times = measure_alone(subject, lanes.lane(tuple(range(quota))), settings)
            for phase, values, peak in zip(Phase, (times.forward_ms, times.backward_ms), peaks, strict=True):
                samples.append(Sample(module=subject.name, phase=phase, quota=quota, times_ms=values, peak_bytes=peak))
    return samples, memory


def _pairs(graph: ModuleGraph, device: Device) -> list[tuple[str, str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Returns pairs that may share a stage, each on half of the device."""
    half = device.num_slots // 2
    if half < 1:
        return []
    halves = (tuple(range(half)), tuple(range(half, device.num_slots)))
    return [
        (first, second, halves) for first, second in combinations(graph.names, 2) if graph.independent(first, second)
    ]
