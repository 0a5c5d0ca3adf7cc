"""``mosaic profile``: finding and measuring a user's modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.hardware import Cluster, find_cluster
from mosaic.profile import Profile
from mosaic.report import Progress

if TYPE_CHECKING:
    from mosaic.backends.base import Backend
    from mosaic.profiler import Counters, Launched, Network, QuotaChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure; the options of ``mosaic profile``."""

    model: str
    """``FILE:FACTORY``."""
    backend: Literal["cuda", "host"] | None = None
    """Where; None for where the model's parameters are."""
    device: int = 0
    """Number of the GPU."""
    max_foreign_share: float = 0.6
    """Share of the CPU above which measuring is refused."""
    quotas: str = "tenths"
    """A choice, or numbers of slots."""
    degrees: str = "1"
    """Numbers of devices."""
    cluster: str | None = None
    """Links between devices; None for those that are usual for the device."""
    bound: float = 0.05
    """Relative error at which adaptive sampling stops."""
    spread: float = 0.05
    """Share of the median within which the quartiles are to lie."""
    sample_seconds: float = 1.0
    """Time after which a sample is taken as it is."""
    groups: int = 0
    """Groups to run side by side."""
    counters: bool = False
    """Whether to read hardware counters where there are any."""
    cache: Path | None = None
    """Folder of measurements; None keeps none."""
    fresh: bool = False
    """Whether to measure again what the folder has."""
    links: Launched | None = None
    """Measured links; None for those of ``cluster``."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile and what is to be said about it."""

    profile: Profile
    """The profile."""
    notes: tuple[str, ...]
    """One sentence each."""


def measure(request: Request) -> Measured:
    """Loads a model, finds its modules and measures them."""
    from mosaic.cli.workload import load_workload
    from mosaic.engine import find_modules
    from mosaic.microbench.devices import moved, open_backend
    from mosaic.profiler import ProfileCache, ProfileSettings, profile_modules

    workload = load_workload(request.model)
    first = next(iter(workload.model.parameters()), None)
    on_gpu = first is not None and first.device.type == "cuda"
    ordinal = (first.device.index or 0) if request.backend is None and first is not None and on_gpu else request.device
    backend = open_backend(request.backend or ("cuda" if on_gpu else "host"), ordinal)
    quotas, degrees = parse_quotas(request.quotas), _numbers("--degrees", request.degrees)
    network = _links(request, max(degrees), backend.device) if max(degrees) > 1 else None
    with Progress() as progress, _counters(backend, wanted=request.counters) as counters:
        finding = find_modules(
            workload.model.to(backend.torch_device),
            moved(workload.sample, backend.torch_device),
            may_share=max(degrees) > 1,  # over several ranks that is no obstacle
        )
        profile = profile_modules(
            workload.model,
            finding.subjects,
            finding.graph,
            backend,
            quotas=quotas,
            degrees=degrees,
            network=network,
            cache=ProfileCache(request.cache, reuse=not request.fresh) if request.cache is not None else None,
            counters=counters,
            settings=ProfileSettings(
                refuse_share=request.max_foreign_share,
                bound=request.bound,
                spread=request.spread,
                sample_seconds=request.sample_seconds,
                groups=request.groups,
            ),
            progress=progress.follow("profiling"),
        )
        missing = counters.missing if counters is not None else ""
    return Measured(profile, (*_said_of(request.links), *_notes(profile, missing)))


def parse_quotas(text: str) -> QuotaChoice | tuple[int, ...]:
    """Returns a choice of quotas or numbers of slots.

    Raises:
        MosaicError: It is neither.
    """
    choices: dict[str, QuotaChoice] = {"tenths": "tenths", "all": "all", "adaptive": "adaptive"}
    if text in choices:
        return choices[text]
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise MosaicError(
            f"--quotas {text} is neither tenths, all, adaptive, nor numbers of slots such as 1,2,4"
        ) from None


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise MosaicError(f"{option} {text} is not a list of numbers such as 1,2,4") from None


def measure_links(backend: Literal["cuda", "host"] | None, cluster: str | None) -> Launched | None:
    """Measures the links between the ranks that torchrun started; None where it did not, or ``cluster`` names links."""
    if cluster is not None:
        return None
    from mosaic.backends.cuda.driver import driver as cuda
    from mosaic.profiler import measure_launched

    return measure_launched(os.environ, on_gpu=backend != "host" and cuda.is_available())


def _said_of(links: Launched | None) -> tuple[str, ...]:
    if links is None:
        return ()
    ring = links.ring
    return (
        f"all-reduces over {links.world_size} ranks were measured: {ring.latency_us:.1f} us a step and "
        f"{ring.gb_per_s:.2f} GB/s; degrees above 1 are composed with that",
    )


def _links(request: Request, gpus: int, device: Device) -> Network:
    """Returns links as they were measured, or else as they are described."""
    return request.links.ring if request.links is not None else _cluster(request.cluster, gpus, device)


def _cluster(where: str | None, gpus: int, device: Device) -> Cluster:
    """Returns the links that gradients are summed over, from a description or from what is usual for the device."""
    from mosaic.profiler.estimate import hardware_of

    if where is not None:
        return find_cluster(where, None if where.endswith(".json") else gpus)
    hardware = hardware_of(device)
    if hardware is None:
        raise MosaicError(f"the links between several {device.name} are not known; describe them: --cluster FILE.json")
    return find_cluster(hardware.name, gpus)


@contextmanager
def _counters(backend: Backend, *, wanted: bool) -> Iterator[Counters | None]:
    from mosaic.profiler import open_counters

    counters = open_counters(backend) if wanted else None
    try:
        yield counters
    finally:
        if counters is not None:
            counters.close()


def _notes(profile: Profile, missing: str) -> Iterator[str]:
    composed = sum(sample.source == "composed" for sample in profile.samples)
    failed = [sample for sample in profile.samples if sample.infeasible is not None]
    yield (
        f"{len(profile.samples)} samples ({composed} composed, {len(failed)} infeasible), "
        f"{len(profile.pairs)} beside one other module, {len(profile.groups)} groups"
    )
    reasons: dict[tuple[str, int, str], set[int]] = {}
    for sample in failed:
        reasons.setdefault((sample.module, sample.degree, sample.infeasible or ""), set()).add(sample.quota)
    for (module, degree, reason), quotas in reasons.items():
        slots = ", ".join(map(str, sorted(quotas)))
        where = f" of each of {degree} devices" if degree > 1 else ""
        yield f"{module} cannot run at {slots} slots{where}: {reason}"
    for error in profile.held_out:
        yield (
            f"{error.subject} {error.phase}: samples left out are predicted within {error.median:.1%} (median), "
            f"{error.largest:.1%} (largest of {error.count})"
        )
    if missing:
        yield f"occupancy and bandwidth are unknown: {missing}"
