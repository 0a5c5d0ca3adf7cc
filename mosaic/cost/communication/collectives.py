"""SMs that collectives take: a collective on a GPU is a kernel. A formula, not measured on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mosaic.cost.interference import Interference, Neighbours
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSms:
    """SMs that a collective's kernel holds while it runs, one for each of its CTAs (NCCL: one a channel).

    On SMs that are reserved it takes nothing from modules. What it needs beyond these it takes from all modules of the
    device alike: they run at 1 - lost of their speed meanwhile, so that a collective of c milliseconds costs each
    c * lost. With ``max_ctas`` held to the reserved SMs nothing is lost.
    """

    ctas: int
    """CTAs of a collective."""
    num_sms: int
    """SMs of the device."""
    reserved_sms: int = 0
    """SMs that no module has."""

    def __post_init__(self) -> None:
        if not (0 <= self.ctas <= self.num_sms and 0 <= self.reserved_sms < self.num_sms):
            raise ValueError(
                f"ctas={self.ctas}, reserved_sms={self.reserved_sms} of num_sms={self.num_sms}; neither is negative, "
                "and a device has more SMs than are reserved"
            )

    @property
    def lost(self) -> float:
        """Share of the modules' SMs that they lack while a collective runs, 0 to 1."""
        beyond = max(0, self.ctas - self.reserved_sms)
        return min(1.0, beyond / (self.num_sms - self.reserved_sms))


class CollectiveInterference:
    """Another form of interference, and the SMs that neighbours' collectives take meanwhile.

    A neighbour's messages are taken to travel as long as they do at its worst degree, and for no longer than the module
    runs: an upper bound, so that what one neighbour costs depends on no other.
    """

    def __init__(self, base: Interference, lost: float, longest_ms: Callable[[str, Phase], float]) -> None:
        """Takes the other form, the share of SMs that is lost, and how long a module's messages travel."""
        self._base = base
        self._lost = lost
        self._longest_ms = longest_ms

    @property
    def is_zero(self) -> bool:
        """Never: collectives take SMs."""
        return False

    @property
    def is_pairwise(self) -> bool:
        """Whether the other form is; what collectives take adds up."""
        return self._base.is_pairwise

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns what neighbours add, in milliseconds."""
        if not beside:
            return 0.0
        taken = sum(min(alone_ms, self._longest_ms(name, phase)) * self._lost for name, _ in beside)
        return self._base.extra_ms(module, phase, quota=quota, alone_ms=alone_ms, beside=beside) + taken
