"""Measured time and memory of a model's modules."""

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
"""Share of the CPU used by other processes above which times on the host are not comparable."""


class Phase(StrEnum):
    """A half of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(StrictFile):
    """Repeated measurements of one phase of one module alone, at one degree and quota."""

    module: str
    phase: Phase
    quota: Annotated[int, Ge(1)]
    degree: Annotated[int, Ge(1)] = 1
    """Data-parallel degree; above 1, times are composed of a measured share and predicted communication."""
    times_ms: tuple[float, ...] = ()
    """Raw measurements in order, without warm-up; empty if ``infeasible``."""
    peak_bytes: Annotated[int, Ge(0)] = 0
    """Peak memory of the phase above the memory before it; 0 if unknown."""
    infeasible: str | None = None
    """The error of the module at this point; None if it ran."""
    measured: str = ""
    """Time of the measurement, ISO 8601, UTC; empty if unknown."""

    def __post_init__(self) -> None:
        where = f"sample of {self.module!r} ({self.phase}, quota {self.quota}, degree {self.degree})"
        if self.infeasible is None:
            _check_times(self.times_ms, where)
        elif self.times_ms or not self.infeasible:
            raise InvalidProfileError(f"{where}: an infeasible sample needs a reason and no times")

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
    """Times of one module beside another one, on disjoint partitions."""

    module: str
    beside: str
    phase: Phase
    quota: Annotated[int, Ge(1)]
    beside_quota: Annotated[int, Ge(1)]
    times_ms: tuple[float, ...]
    alone_ms: tuple[float, ...]
    """Times alone, measured in turn with ``times_ms``."""

    def __post_init__(self) -> None:
        for times in (self.times_ms, self.alone_ms):
            _check_times(times, f"pair {self.module!r} beside {self.beside!r}")

    @property
    def slowdown(self) -> float:
        alone = statistics.median(self.alone_ms)
        return statistics.median(self.times_ms) / alone if alone > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory(StrictFile):
    """Bytes that a module holds on its device at any quota."""

    module: str
    resident_bytes: Annotated[int, Ge(0)]
    """Parameters, buffers and gradients."""
    activation_bytes: Annotated[int, Ge(0)]
    """Activations saved for backward; 0 if unknown."""
    lane_bytes: Annotated[int, Ge(0)] = 0
    """Library workspaces of its lane, such as cuBLAS's; 0 if unknown."""
    num_trained: Annotated[int, Ge(0)] | None = None
    """Number of trainable parameters; None if unknown."""


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
    """Start of the measurements; reused samples are older; empty if unknown."""
    foreign_cpu_share: float
    """Share of the CPU time used by other processes during the measurements, 0 to 1."""


def note_of_others(share: float | None, device: Device, *, strict: bool = False) -> str:
    """Returns a note if other processes used the CPU during a measurement; with ``strict`` on the host, raises."""
    if share is None or share <= COMPARABLE_SHARE:
        return ""
    note = f"other processes used {share:.0%} of the CPU"
    if device.kind != "host":  # events measure the GPU itself
        return note
    if strict:
        raise UnstableMeasurementError(f"{note}: stop them, measure later, or leave out strict")
    return f"{note}; times are not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(StrictFile):
    """All measurements of the modules of one graph on one device."""

    schema_version: int = 7
    device: Device
    graph: ModuleGraph
    samples: tuple[Sample, ...]
    pairs: tuple[PairSample, ...] = ()
    memory: tuple[ModuleMemory, ...] = ()
    structures: Mapping[str, str] = field(default_factory=dict)
    """Hash of each module's classes, settings, and parameters' shapes and dtypes; empty if unknown."""
    left_out: tuple[str, ...] = ()
    """Descriptions of measurements beyond the time limit."""
    environment: Environment

    def __post_init__(self) -> None:
        quotas = [(sample.module, sample.quota) for sample in self.samples]
        for pair in self.pairs:
            quotas += [(pair.module, pair.quota), (pair.beside, pair.beside_quota)]
        for module, quota in quotas:
            if module not in self.graph.names:
                raise InvalidProfileError(f"the profile has {module!r}, which its graph lacks")
            if quota > self.device.num_slots:
                raise InvalidProfileError(f"{module!r} was measured on {quota} slots of {self.device}")
        counts = Counter((sample.module, sample.phase, sample.degree, sample.quota) for sample in self.samples)
        for module, phase, degree, quota in (key for key, count in counts.items() if count > 1):
            raise InvalidProfileError(f"two samples for {module!r} {phase}, degree {degree}, quota {quota}; remove one")

    save = artifact.save  # which ``mosaic.load`` reads

    def check_matches(
        self, *, graph: ModuleGraph, device: Device, environment: Environment, structures: Mapping[str, str]
    ) -> None:
        """Raises InvalidProfileError if the profile is of another model or device; warns of other versions."""
        if self.device != device:
            raise InvalidProfileError(f"the profile is for {self.device}, not for {device}; profile again on it")
        if self.graph.fingerprint != graph.fingerprint:
            raise InvalidProfileError(f"the profile is for {self.graph}, not for {graph}; profile this model again")
        if changed := [name for name, current in structures.items() if self.structures.get(name, current) != current]:
            raise InvalidProfileError(f"{', '.join(changed)} changed since the profile; profile this model again")
        for name in ("driver_version", "driver", "torch_version"):
            recorded, current = getattr(self.environment, name), getattr(environment, name)
            if recorded and current and recorded != current:
                warnings.warn(f"the profile has {name}={recorded}, this machine {current}; profile again", stacklevel=2)


def _check_times(times_ms: tuple[float, ...], where: str) -> None:
    if not times_ms or not all(0 <= time < math.inf for time in times_ms):
        raise InvalidProfileError(f"{where} has times {times_ms}; use one or more, finite and not negative")
