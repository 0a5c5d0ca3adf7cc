"""Groups of modules that ran side by side, in three sets of groups: to fit, to choose a form by, to judge.

Where they ran decides the source of all figures: on the chip of ``bench.cost.chip`` they are simulated, on a backend
measured (``bench.cost.groups``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.record import Source
from mosaic.cost import HasBandwidth
from mosaic.profile import PairSample, Phase, Sample

SAME, OTHER = "other groups of the fitted modules", "groups of other modules"
"""Sets that judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One module of a group."""

    module: str
    """Its name."""
    phase: Phase
    """Forward or backward, of all of a group."""
    quota: int
    """Its slots."""
    alone_ms: float
    """Its time with nobody beside it, at this quota."""
    beside_ms: float
    """Its time while all others of the group keep running."""


Group = tuple[Member, ...]
Placed = tuple[tuple[str, int], ...]
"""Modules and their slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All that forms of interference are fitted to, chosen by and judged by."""

    source: Source
    """``simulated`` or ``measured``."""
    head: str
    """Put before the names of its figures."""
    bandwidths: HasBandwidth
    """What every module uses alone."""
    alone: tuple[Sample, ...] = ()
    """Modules alone, where plans are made of them."""
    pairs: tuple[PairSample, ...] = ()
    """Fitted modules two by two."""
    fit: tuple[Group, ...]
    """Groups that coefficients are fitted to."""
    choose: tuple[Group, ...]
    """Groups by which one form is chosen."""
    judge: Mapping[str, tuple[Group, ...]]
    """Groups that judge, by set."""
    again: tuple[Group, ...] = ()
    """The first set that judges, run once more."""


def draw_groups(
    names: Sequence[str],
    *,
    sizes: Sequence[int],
    count: int,
    quotas: Sequence[int],
    num_slots: int,
    dice: random.Random,
    taken: set[frozenset[tuple[str, int]]],
) -> tuple[Placed, ...]:
    """Draws groups of each size that were not drawn before, and notes them in ``taken``.

    Args:
        names: Modules.
        sizes: Modules side by side.
        count: Groups of each size; fewer where there are no more.
        quotas: Slots that a module may have.
        num_slots: Slots of the device; three quarters of them or more are given out where quotas allow.
        dice: Decides.
        taken: Groups drawn before, whatever their order.
    """
    found: list[Placed] = []
    for size in sizes:
        least = min(num_slots * 3 // 4, size * max(quotas))
        before = len(found)
        for _ in range(500 * count):
            if len(found) - before == count or size > len(names):
                break
            placed = tuple((name, dice.choice(quotas)) for name in dice.sample(list(names), size))
            if least <= sum(quota for _, quota in placed) <= num_slots and frozenset(placed) not in taken:
                taken.add(frozenset(placed))
                found.append(placed)
    return tuple(found)
