"""Measured time and memory of a model's modules: the file that plans are made from."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from mosaic import artifact
from mosaic.artifact import Ge, StrictFile
from mosaic.device import Device
from mosaic.errors import InvalidProfileError, UnstableMeasurementError
from mosaic.graph import ModuleGraph

COMPARABLE_SHARE = 0.10
"""Of the CPU time, what other processes may take before times on the host are not comparable with others."""


class Phase(StrEnum):
    """Half of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(StrictFile):
    """Repeated measurements of one phase of one module, alone on the device, at one degree and quota."""

    module: str
    phase: Phase
    quota: Annotated[int, Ge(1)]
    degree: Annotated[int, Ge(1)] = 1
    """Data-parallel degree; above 1 the time of a share, with modelled communication."""
    times_ms: tuple[float, ...] = ()
    """Raw measurements in their order, without those of the warm-up; empty where ``infeasible``."""
    peak_bytes: Annotated[int, Ge(0)] = 0
    """Most memory in use during the phase above what was in use before it; 0 where unknown."""
    infeasible: str | None = None
    """The error that the module raised here; None where it ran."""
    measured: str = ""
    """Time of the measurement, ISO 8601, UTC; empty if unknown."""

    def __post_init__(self) -> None:
        where = f"sample of {self.module!r} ({self.phase}, quota {self.quota}, degree {self.degree})"
        if self.infeasible is None:
            _check_times(self.times_ms, where)
        elif self.times_ms or not self.infeasible:
            raise InvalidProfileError(f"{where}: an infeasible sample has a reason and no times")

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """First and third quartile."""
        if len(self.times_ms) <= 1:
            return self.median_ms, self.median_ms
        first, _, third = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample(StrictFile):
    """Times of one module while another ran beside it, both on partitions of their own."""

    module: str
    beside: str
    phase: Phase
    quota: Annotated[int, Ge(1)]
    beside_quota: Annotated[int, Ge(1)]
    times_ms: tuple[float, ...]
    alone_ms: tuple[float, ...]
    """Taken in turn with ``times_ms``, while the other partition was idle."""

    def __post_init__(self) -> None:
        for times in (self.times_ms, self.alone_ms):
            _check_times(times, f"pair {self.module!r} beside {self.beside!r}")

    @property
    def slowdown(self) -> float:
        alone = statistics.median(self.alone_ms)
        return statistics.median(self.times_ms) / alone if alone > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory(StrictFile):
    """Bytes that a module keeps on its device whatever its quota."""

    module: str
    resident_bytes: Annotated[int, Ge(0)]
    """Parameters, buffers and gradients."""
    activation_bytes: Annotated[int, Ge(0)]
    """Kept from forward to backward; 0 where unknown."""
    lane_bytes: Annotated[int, Ge(0)] = 0
    """Kept by libraries for a lane of its own, such as cuBLAS's workspaces; 0 where unknown."""
    num_trained: Annotated[int, Ge(0)] | None = None
    """Parameters that take a gradient, counted as elements; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(StrictFile):
    """Software and time of a measurement."""

    torch_version: str
    python_version: str
    driver_version: str = ""
    """Version of the CUDA driver; empty on the host."""
    driver: str = ""
    """Release of the kernel driver, such as ``580.95.05``; empty on the host."""
    created: str
    """End of the measurements, ISO 8601, UTC."""
    began: str = ""
    """Their beginning, before which reused samples were measured; empty if unknown."""
    foreign_cpu_share: float
    """Share of this process's cores' time that other processes took during the measurements, 0 to 1."""


def note_of_others(share: float | None, device: Device, *, strict: bool = False) -> str:
    """Returns a note if other processes used the CPU during a measurement; with ``strict`` on the host, raises it."""
    if share is None or share <= COMPARABLE_SHARE:
        return ""
    note = f"other processes used {share:.0%} of the CPU"
    if device.kind != "host":  # a GPU's own events time its work
        return note
    if strict:
        raise UnstableMeasurementError(f"{note}: stop them, measure later, or leave strict out")
    return f"{note}; times are not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(StrictFile):
    """Everything measured about the modules of one graph on one device."""

    schema_version: int = 7
    device: Device
    graph: ModuleGraph
    samples: tuple[Sample, ...]
    pairs: tuple[PairSample, ...] = ()
    memory: tuple[ModuleMemory, ...] = ()
    structures: Mapping[str, str] = field(default_factory=dict)
    """Hash of each module's classes, settings, and parameters' shapes and dtypes; empty if unknown."""
    left_out: tuple[str, ...] = ()
    """Measurements beyond the time limit, in words."""
    environment: Environment

    def __post_init__(self) -> None:
        quotas = [(sample.module, sample.quota) for sample in self.samples]
        for pair in self.pairs:
            quotas += [(pair.module, pair.quota), (pair.beside, pair.beside_quota)]
        for module, quota in quotas:
            if module not in self.graph.names:
                raise InvalidProfileError(f"the profile measures {module!r}, not in its graph")
            if quota > self.device.num_slots:
                raise InvalidProfileError(f"{module!r} was measured on {quota} slots of {self.device}")
        counts = Counter((sample.module, sample.phase, sample.degree, sample.quota) for sample in self.samples)
        for module, phase, degree, quota in (key for key, count in counts.items() if count > 1):
            raise InvalidProfileError(f"two samples for {module!r} {phase}, degree {degree}, quota {quota}; keep one")

    save = artifact.save  # which ``mosaic.load`` reads

    def check_matches(
        self, *, graph: ModuleGraph, device: Device, environment: Environment, structures: Mapping[str, str]
    ) -> None:
        """Raises InvalidProfileError if the profile is of another model or device; warns of other versions."""
        if self.device != device:
            raise InvalidProfileError(f"the profile is of {self.device}, and this is {device}; profile again on it")
        if self.graph.fingerprint != graph.fingerprint:
            raise InvalidProfileError(f"the profile is of {self.graph}, this is {graph}; profile this model again")
        if changed := [name for name, now in structures.items() if self.structures.get(name, now) != now]:
            raise InvalidProfileError(f"{', '.join(changed)} changed since the profile; profile this model again")
        for name in ("driver_version", "driver", "torch_version"):
            then, now = getattr(self.environment, name), getattr(environment, name)
            if then and now and then != now:
                warnings.warn(f"the profile is measured with {name}={then}, this is {now}; profile again", stacklevel=2)


def _check_times(times_ms: tuple[float, ...], where: str) -> None:
    if not times_ms or not all(0 <= time < math.inf for time in times_ms):
        raise InvalidProfileError(f"{where} has times {times_ms}; give one or more, finite and not negative")
