"""Measured time and memory of a model's modules: the file that plans are made from."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from annotated_types import Ge

from mosaic.artifact import fingerprint
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import InvalidProfileError
from mosaic.graph import ModuleGraph


class Phase(StrEnum):
    """Half of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Repeated measurements of one phase of one module, alone on the device, at one degree and quota."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """Name in the graph."""
    phase: Phase
    """Forward or backward."""
    quota: Annotated[int, Ge(1)]
    """Slots it ran on."""
    degree: Annotated[int, Ge(1)] = 1
    """Data-parallel degree; 1 is one device."""
    times_ms: tuple[float, ...]
    """Raw measurements in milliseconds, in the order taken, warm-up excluded."""
    peak_bytes: Annotated[int, Ge(0)] = 0
    """Most memory in use during the phase above what was in use before it; 0 where unknown."""

    def __post_init__(self) -> None:
        where = f"sample of {self.module!r} ({self.phase}, quota {self.quota}, degree {self.degree})"
        if not self.times_ms:
            raise InvalidProfileError(f"{where} has no measurements; at least one is needed")
        # `not x >= 0` also catches NaN.
        wrong = [time for time in self.times_ms if not 0 <= time < float("inf")]
        if wrong:
            raise InvalidProfileError(f"{where} holds {wrong[0]} ms; a time is finite and not negative")
        if self.quota < 1 or self.degree < 1:
            raise InvalidProfileError(f"{where}: quota and degree start at 1")

    @property
    def median_ms(self) -> float:
        """Median of the measurements, in milliseconds."""
        return statistics.median(self.times_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """First and third quartile of the measurements, in milliseconds."""
        if len(self.times_ms) == 1:
            return self.times_ms[0], self.times_ms[0]
        first, _, third = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample:
    """What one module took while another ran beside it, both on partitions of their own."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """The module that was timed."""
    beside: str
    """The module that kept running next to it."""
    phase: Phase
    """Forward or backward, of both."""
    quota: Annotated[int, Ge(1)]
    """Slots of the timed module."""
    beside_quota: Annotated[int, Ge(1)]
    """Slots of the other."""
    times_ms: tuple[float, ...]
    """Raw measurements in milliseconds while the other ran."""
    alone_ms: tuple[float, ...]
    """Raw measurements of the same module and quota with the other partition idle, taken in turn with them."""

    def __post_init__(self) -> None:
        for time in (*self.times_ms, *self.alone_ms):
            if not 0 <= time < float("inf"):
                raise InvalidProfileError(
                    f"pair {self.module!r} beside {self.beside!r} holds {time} ms; a time is finite and not negative"
                )
        if not self.times_ms or not self.alone_ms:
            raise InvalidProfileError(f"pair {self.module!r} beside {self.beside!r} has no measurements")

    @property
    def slowdown(self) -> float:
        """Median time beside the other over median time alone; 1 means undisturbed."""
        alone = statistics.median(self.alone_ms)
        return statistics.median(self.times_ms) / alone if alone > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Bytes that a module keeps on its device whatever its quota."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """Name in the graph."""
    resident_bytes: Annotated[int, Ge(0)]
    """Parameters, buffers and gradients."""
    activation_bytes: Annotated[int, Ge(0)]
    """Kept from forward to backward; 0 where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when a profile was measured."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    torch_version: str
    """Version of torch."""
    python_version: str
    """Version of Python."""
    driver_version: str = ""
    """Version of the CUDA driver; empty on the host."""
    created: str
    """Date and time, ISO 8601, UTC."""
    foreign_cpu_share: float
    """Share of the machine's CPU time that other processes took during the measurement, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured about the modules of one graph on one device.

    Raises:
        InvalidProfileError: A sample names an unknown module, asks for more slots than there are, or two
            samples describe the same module, phase, degree and quota.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    device: Device
    """Where it was measured."""
    graph: ModuleGraph
    """What was measured."""
    samples: tuple[Sample, ...]
    """Each module alone."""
    pairs: tuple[PairSample, ...] = ()
    """Modules side by side."""
    memory: tuple[ModuleMemory, ...] = ()
    """What modules keep."""
    environment: Environment
    """Software, date, and how quiet the machine was."""

    def __post_init__(self) -> None:
        names = set(self.graph.names)
        seen: set[tuple[str, Phase, int, int]] = set()
        for sample in self.samples:
            key = (sample.module, sample.phase, sample.degree, sample.quota)
            if sample.module not in names:
                raise InvalidProfileError(f"the profile has a sample of {sample.module!r}, not in its graph")
            if sample.quota > self.device.num_slots:
                raise InvalidProfileError(
                    f"sample of {sample.module!r} at {sample.quota} slots; "
                    f"{self.device.name} has {self.device.num_slots}"
                )
            if key in seen:
                raise InvalidProfileError(
                    f"two samples for {sample.module!r} {sample.phase} at degree {sample.degree}, "
                    f"quota {sample.quota}; keep one"
                )
            seen.add(key)
        for pair in self.pairs:
            if pair.module not in names or pair.beside not in names:
                raise InvalidProfileError(
                    f"the profile has a pair {pair.module!r} beside {pair.beside!r}, not in its graph"
                )

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name this profile."""
        return fingerprint(self)

    def samples_of(self, module: str, phase: Phase, degree: int = 1) -> tuple[Sample, ...]:
        """Returns the samples of one module, phase and degree by rising quota."""
        chosen = [s for s in self.samples if (s.module, s.phase, s.degree) == (module, phase, degree)]
        return tuple(sorted(chosen, key=lambda sample: sample.quota))

    def check_matches(self, *, graph: ModuleGraph, device: Device) -> None:
        """Raises InvalidProfileError unless this profile is of ``graph`` and was measured on ``device``."""
        if self.device != device:
            raise InvalidProfileError(
                f"the profile was measured on {self.device.name} with {self.device.num_slots} slots, but this "
                f"is {device.name} with {device.num_slots}; profile again on this device"
            )
        if self.graph.fingerprint != graph.fingerprint:
            raise InvalidProfileError(
                f"the profile is of modules {', '.join(self.graph.names)} (graph {self.graph.fingerprint}), "
                f"not of {', '.join(graph.names)} (graph {graph.fingerprint}) with these input shapes; "
                "profile this model again"
            )
