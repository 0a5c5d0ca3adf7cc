"""The interface of cost models."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mosaic.cost.interference import Interference, Neighbours
from mosaic.profile import Phase


class Cost(ABC):
    """Time, memory and interference of modules, measured or analytic (paper section 3.3).

    Attributes:
        profile_fingerprint: Fingerprint of the profile; None without one.
        interference: Slowdown by neighbours on a device.
    """

    profile_fingerprint: str | None
    interference: Interference

    @abstractmethod
    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the available data-parallel degrees, increasing."""

    @abstractmethod
    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the available quotas in slots, increasing."""

    @abstractmethod
    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time of one phase alone on the device, in milliseconds.

        Raises:
            InvalidProfileError: The module is unknown.
            ValueError: ``degree`` or ``quota`` is not available.
        """

    @abstractmethod
    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes on each of the module's devices while its stage runs; 0 if unknown."""

    @abstractmethod
    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the part of ``memory_bytes`` held while other stages run; 0 if unknown."""

    def interference_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours) -> float:
        """Returns the time that neighbours on one device add to a phase, in milliseconds (paper Eq. 7's delta)."""
        if not beside:
            return 0.0
        alone_ms = self.time_ms(module, phase, degree, quota)
        return self.interference.extra_ms(module, phase, quota=quota, alone_ms=alone_ms, beside=beside)

    def placed_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Neighbours = ()) -> float:
        """Returns the time of one phase beside neighbours on one device, in milliseconds.

        On several devices with different neighbours, the longest time counts (paper Eq. 7).
        """
        added_ms = self.interference_ms(module, phase, degree, quota, beside=beside)
        return self.time_ms(module, phase, degree, quota) + added_ms


class RetimedCost(Cost):
    """Base class for cost models that override times and delegate the rest to another model, ``base``.

    Interference is the base's, unless ``interference`` is set.
    """

    def __init__(self, base: Cost) -> None:
        self.base = base
        self.interference = base.interference
        self.profile_fingerprint = base.profile_fingerprint

    def degrees(self, module: str) -> tuple[int, ...]:
        return self.base.degrees(module)

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        return self.base.quotas(module, degree)

    def memory_bytes(self, module: str, degree: int) -> int:
        return self.base.memory_bytes(module, degree)

    def kept_bytes(self, module: str, degree: int) -> int:
        return self.base.kept_bytes(module, degree)
