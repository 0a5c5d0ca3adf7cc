"""A cost model whose times are another one's, made anew; all else stays the other's."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mosaic.cost.interference import Beside, Interference
from mosaic.cost.model import Cost
from mosaic.profile import Phase


class RetimedCost(ABC):
    """Times alone of its own over a base's degrees, quotas, memory and bandwidth.

    Neighbours disturb the new times by the form that the base has, unless another one is set.

    Attributes:
        base: The other model.
        interference: How neighbours disturb each other.
    """

    def __init__(self, base: Cost) -> None:
        self.base = base
        self.interference: Interference = base.interference

    @property
    def profile_fingerprint(self) -> str | None:
        """Names the profile behind the base."""
        return self.base.profile_fingerprint

    @abstractmethod
    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone on its devices, in milliseconds."""

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the degrees that may be asked for, rising."""
        return self.base.degrees(module)

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the quotas in slots that may be asked for, rising."""
        return self.base.quotas(module, degree)

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes on each of its devices."""
        return self.base.memory_bytes(module, degree)

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes that it keeps on each of its devices while other stages run."""
        return self.base.kept_bytes(module, degree)

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of a device's memory bandwidth that it uses alone, 0 to 1."""
        return self.base.bandwidth(module, phase, degree, quota)

    def interference_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Beside) -> float:
        """Returns what neighbours on one device add to the time alone, in milliseconds."""
        if not beside:
            return 0.0
        alone_ms = self.time_ms(module, phase, degree, quota)
        return self.interference.extra_ms(module, phase, quota=quota, alone_ms=alone_ms, beside=beside)

    def placed_ms(self, module: str, phase: Phase, degree: int, quota: int, *, beside: Beside = ()) -> float:
        """Returns the time beside neighbours on one device, in milliseconds."""
        alone_ms = self.time_ms(module, phase, degree, quota)
        return alone_ms + self.interference_ms(module, phase, degree, quota, beside=beside)
