"""Contents of every result file: where it comes from, spreads, and what could not be had."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mosaic.artifact import Ge
from mosaic.backends.base import Backend
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import MosaicError
from mosaic.microbench.settings import Budget
from mosaic.profiler import ForeignLoad
from mosaic.provenance import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of one thing; the unit stands in the name of the field that holds it."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    median: float
    """Middle."""
    first_quartile: float
    """A quarter lie below."""
    third_quartile: float
    """A quarter lie above."""
    count: Annotated[int, Ge(1)]
    """How many there are."""
    samples: tuple[float, ...]
    """All of them, in the order taken."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarises at least one measurement."""
        values = tuple(float(sample) for sample in samples)
        if not values:
            raise ValueError("a spread needs at least one measurement")
        first, middle, third = (values[0],) * 3
        if len(values) > 1:
            first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=middle, first_quartile=first, third_quartile=third, count=len(values), samples=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """Something that was to be measured and cannot be had here."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    what: str
    """What it is."""
    reason: str
    """Why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a result comes from."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    backend: str
    """``host`` or ``cuda``."""
    device: Device
    """What was measured."""
    torch_version: str
    """Version of torch."""
    driver_version: str
    """CUDA version that the driver serves; empty on the host."""
    provenance: Provenance
    """Command, date, commit."""
    notes: tuple[str, ...]
    """What to know about the backend here."""
    foreign_cpu_share: float | None
    """Share of the CPU that other processes took meanwhile, 0 to 1; None where unknown."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the result of every question has."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    origin: Origin
    """Where it comes from."""
    left_out: tuple[str, ...] = ()
    """What the time did not reach for."""
    absent: tuple[NotMeasured, ...] = ()
    """What cannot be had here."""


class Recorder:
    """Notes what belongs into every result while a question is measured."""

    def __init__(self, backend: Backend, budget: Budget) -> None:
        self.backend = backend
        self.budget = budget
        self.absent: list[NotMeasured] = []
        self._load = ForeignLoad()
        self._used_before_s = budget.used_s
        self._left_out_before = len(budget.left_out)

    def cannot(self, what: str, reason: object) -> NotMeasured | None:
        """Notes something that cannot be had, with the reason; returns what is new, None what was noted before."""
        text = " ".join(str(reason).split())
        if isinstance(reason, Exception) and not isinstance(reason, MosaicError):
            text = f"{type(reason).__name__}: {text}"  # others' errors may say nothing without their kind
        found = NotMeasured(what=what, reason=text)
        if found in self.absent:
            return None
        self.absent.append(found)
        return found

    @property
    def left_out(self) -> tuple[str, ...]:
        """What this question had no time for."""
        return self.budget.left_out[self._left_out_before :]

    def origin(self) -> Origin:
        """Returns where the result comes from; to be called at the end."""
        on_host = self.backend.device.kind == "host"
        notes = self.backend.notes
        if on_host:
            notes = ("measured on the CPU's cores: these times say nothing about a GPU", *notes)
        return Origin(
            backend=self.backend.name,
            device=self.backend.device,
            torch_version=torch.__version__,
            driver_version="" if self.backend.torch_device.type != "cuda" else _driver_version(),
            provenance=Provenance.here(),
            notes=notes,
            foreign_cpu_share=self._load.share,
            seconds=round(self.budget.used_s - self._used_before_s, 3),
        )


def _driver_version() -> str:
    from mosaic.backends.cuda.driver import describe_driver

    return describe_driver().version
