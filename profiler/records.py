"""Records that a cache keeps: measurements of one module, and of modules side by side, whatever they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from mosaic.device import FORBID_EXTRA, Device
from mosaic.profile import ModuleMemory, PairSample, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleKey:
    """What a module's time depends on; equal keys may share measurements."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    structure: str
    """See ``digest_of``."""
    inputs: str
    """See ``inputs_of``."""
    device: Device
    """Where it runs; without its memory, which decides whether a module fits and not how long it takes."""
    torch_version: str
    """Version of torch."""
    driver: str
    """Release of the kernel driver and version of CUDA; empty on the host."""
    threads: str = ""
    """What decides how many threads compute on the host: cores, inter-op threads, and how idle ones wait; empty on a
    GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One point, and how far it can be trusted."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    samples: tuple[Sample, ...]
    """Forward and backward. Of a degree above 1, compute alone, without communication."""
    foreign_cpu_share: float | None
    """Share of the machine's CPU time that other processes took meanwhile; None where unknown."""

    @property
    def point(self) -> tuple[int, int]:
        """Degree and quota."""
        return self.samples[0].degree, self.samples[0].quota


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord:
    """Measurements of one module."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: Literal[1] = 1
    """Version of this file's layout."""
    key: ModuleKey
    """Which module."""
    memory: ModuleMemory | None = None
    """What it keeps."""
    points: tuple[MeasuredPoint, ...] = ()
    """What was measured, each point once."""

    def merged(self, points: Iterable[MeasuredPoint], memory: ModuleMemory | None) -> ModuleRecord:
        """Returns the record with newer measurements in the place of older ones."""
        known = {kept.point: kept for kept in (*self.points, *points)}
        return dataclasses.replace(self, points=tuple(known.values()), memory=memory or self.memory)

    def renamed(self, name: str) -> ModuleRecord:
        """Returns the record of a module that has another name."""
        return dataclasses.replace(
            self,
            memory=dataclasses.replace(self.memory, module=name) if self.memory is not None else None,
            points=tuple(
                dataclasses.replace(
                    kept, samples=tuple(dataclasses.replace(sample, module=name) for sample in kept.samples)
                )
                for kept in self.points
            ),
        )

    def at(self, degree: int, quota: int) -> MeasuredPoint | None:
        """Returns one point; None where it was not measured."""
        return next((kept for kept in self.points if kept.point == (degree, quota)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairKey:
    """Two modules side by side; their order is that of their names in a record: ``0``, ``1``."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    modules: tuple[ModuleKey, ...]
    """Who."""
    quotas: tuple[int, ...]
    """Slots of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """Measurements of two modules side by side, in both phases."""

    SCHEMA_VERSION: ClassVar[int] = 2
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: Literal[2] = 2
    """Version of this file's layout."""
    key: PairKey
    """Which modules."""
    pairs: tuple[PairSample, ...] = ()
    """Each of the two beside the other."""
