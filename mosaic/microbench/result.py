"""Contents of every result file: origin, spreads, and unavailable measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mosaic.backends.base import Backend
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.microbench.settings import Budget
from mosaic.profiler import ForeignLoad
from mosaic.provenance import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of one quantity; the field's name has the unit."""

    median: float
    """Middle."""
    first_quartile: float
    """A quarter lie below."""
    third_quartile: float
    """A quarter lie above."""
    count: int
    """Number of samples."""
    samples: tuple[float, ...]
    """All samples in order."""

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
    """A measurement that is unavailable here."""

    what: str
    """The measurement."""
    reason: str
    """The reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a result."""

    backend: str
    """``host`` or ``cuda``."""
    device: Device
    """The measured device."""
    torch_version: str
    """Version of torch."""
    driver_version: str
    """CUDA version that the driver serves; empty on the host."""
    provenance: Provenance
    """Command, date, commit."""
    notes: tuple[str, ...]
    """Remarks about the backend."""
    foreign_cpu_share: float | None
    """Share of the CPU of other processes meanwhile, 0 to 1; None if unknown."""
    seconds: float
    """Duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Common fields of all results."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    """Version of this file's layout."""
    origin: Origin
    """Origin of the result."""
    left_out: tuple[str, ...] = ()
    """Pieces beyond the time budget."""
    absent: tuple[NotMeasured, ...] = ()
    """Unavailable measurements."""


class Recorder:
    """Collects the common fields of a result during a measurement."""

    def __init__(self, backend: Backend, budget: Budget) -> None:
        self.backend = backend
        self.budget = budget
        self.absent: list[NotMeasured] = []
        self._load = ForeignLoad()
        self._used_before_s = budget.used_s
        self._left_out_before = len(budget.left_out)

    def cannot(self, what: str, reason: object) -> NotMeasured | None:
        """Notes an unavailable measurement and its reason; returns it, or None if it was noted before."""
        text = " ".join(str(reason).split())
        if isinstance(reason, Exception) and not isinstance(reason, MosaicError):
            text = f"{type(reason).__name__}: {text}"  # messages of other libraries may need the error's type
        entry = NotMeasured(what=what, reason=text)
        if entry in self.absent:
            return None
        self.absent.append(entry)
        return entry

    def common(self) -> dict[str, Any]:
        """Returns the common fields of the result; call it at the end."""
        return {
            "origin": self._origin(),
            "absent": tuple(self.absent),
            "left_out": self.budget.left_out[self._left_out_before :],
        }

    def _origin(self) -> Origin:
        notes = self.backend.notes
        if self.backend.device.kind == "host":
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
