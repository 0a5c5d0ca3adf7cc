"""The one interface through which time and memory of modules are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from mosaic.cost.interference import Interference, Neighbours
from mosaic.profile import Phase


class Cost(Protocol):
    """The questions that a solver asks of a cost model, measured or analytic (paper section 3.3)."""

    @property
    def profile_fingerprint(self) -> str | None:
        """Names the profile behind it; None where there is none."""

    @property
    def interference(self) -> Interference:
        """The slowdown of neighbours on a device."""

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the data-parallel degrees that may be asked for, rising."""

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the quotas in slots that may be asked for, rising."""

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone on the device, in milliseconds."""

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes that the module needs on each of its devices; 0 where unknown."""

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes of those that it keeps on each device while other stages run; 0 where unknown."""

    def interference_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours) -> float:
        """Returns what neighbours on one device add to the time, in milliseconds."""

    def placed_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours = ()) -> float:
        """Returns the time beside neighbours on one device, in milliseconds."""


class TimedBeside(ABC):
    """Times beside neighbours, for cost models that know times alone and a form of interference.

    Attributes:
        interference: How neighbours on a device slow each other down.
    """

    interference: Interference

    @abstractmethod
    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone on the device, in milliseconds."""

    def interference_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours) -> float:
        """Returns what the neighbours on one device add to a phase, in milliseconds (paper Eq. 7's delta)."""
        if not beside:
            return 0.0
        alone_ms = self.time_ms(module, phase, degree, quota)
        return self.interference.extra_ms(module, phase, quota=quota, alone_ms=alone_ms, beside=beside)

    def placed_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours = ()) -> float:
        """Returns the time of one phase beside the given (module, quota) neighbours, in milliseconds.

        A module on several devices with different neighbours takes the longest of them (paper Eq. 7).

        Raises:
            InvalidProfileError: The module is not known.
            ValueError: ``degree`` or ``quota`` lies outside what is known.
        """
        return self.time_ms(module, phase, degree, quota) + self.interference_ms(
            module, phase, degree, quota, beside=beside
        )


class RetimedCost(TimedBeside):
    """Base class for cost models that override times and delegate everything else.

    Neighbours disturb the new times by the form of the base, unless ``interference`` is set.

    Attributes:
        base: The other model.
    """

    def __init__(self, base: Cost) -> None:
        self.base = base
        self.interference: Interference = base.interference

    @property
    def profile_fingerprint(self) -> str | None:
        """Name of the profile behind the base."""
        return self.base.profile_fingerprint

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the degrees of the base, rising."""
        return self.base.degrees(module)

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the quotas of the base, rising."""
        return self.base.quotas(module, degree)

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes on each of the module's devices."""
        return self.base.memory_bytes(module, degree)

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes that the module keeps on each of its devices while other stages run."""
        return self.base.kept_bytes(module, degree)
