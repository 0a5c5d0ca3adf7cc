"""A cost model whose times are another one's, made anew; all else stays the other's."""

from __future__ import annotations

from mosaic.cost.interference import Interference
from mosaic.cost.protocol import Cost, TimedBeside


class RetimedCost(TimedBeside):
    """Times alone of its own over a base's degrees, quotas and memory.

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
