"""The question that every form of interference answers: what neighbours on one device cost a module.

Partitions of a layout never share an SM (or a core), but memory bandwidth, caches and power are shared, so a
module beside others takes longer than alone. A module alone loses nothing, by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mosaic.profile import Phase

Neighbours = Sequence[tuple[str, int]]
"""Others on one device: each module's name and its quota in slots."""


class HasBandwidth(Protocol):
    """Anything that knows B(m, a) of paper section 3.3, such as ``Bandwidths`` or an analytic cost model."""

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone uses, 0 to 1."""


class Interference(Protocol):
    """A form of interference; never negative, and zero without neighbours.

    The solver relies on both: the time alone is then a lower bound on the time beside anyone.
    """

    @property
    def is_zero(self) -> bool:
        """Whether it is zero for every module and every neighbour."""

    @property
    def is_pairwise(self) -> bool:
        """Whether the extras of single neighbours simply add up; solvers then can state it linearly."""

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the time that ``beside`` costs ``module`` in one phase on one device, in milliseconds.

        Args:
            module: The module that is slowed down.
            phase: Forward or backward, of all of them.
            quota: Slots of ``module``.
            alone_ms: Its time alone at this quota (and its degree), in milliseconds.
            beside: The others on the device; empty when it is alone.
        """


@runtime_checkable
class PairShares(Protocol):
    """A pairwise form whose extras are shares of the time alone; the exact search then asks it far less often."""

    def pair_shares(
        self, module: str, beside: str, phase: Phase, *, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> Sequence[Sequence[float]]:
        """Returns the extra shares of ``module`` beside one neighbour; empty where they all are 0.

        Args:
            module: The module that is slowed down.
            beside: The neighbour.
            phase: Forward or backward, of both.
            quotas: Slots that ``module`` may have: the rows.
            beside_quotas: Slots that the neighbour may have: the entries of a row.
        """


class NoInterference:
    """Modules do not disturb each other: the paper's interference-unaware ablation (section 5.3.2)."""

    is_zero = True
    is_pairwise = True

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns 0."""
        return 0.0
