"""Corrects a cost model by the measured times of a plan.

A solver prefers what its cost model underestimates. Solving again with corrected times recovers most of what the
errors cost in one or two rounds (``bench/README.md``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mosaic.cost import Cost
from mosaic.cost.protocol import RetimedCost
from mosaic.plan import Plan
from mosaic.profile import Phase

MeasuredTimes = Mapping[tuple[str, Phase], float]
"""Milliseconds of each module's phase in a plan that was run; what was not measured is left out."""

_Point = tuple[int, int]
"""Degree and quota."""


class CorrectedCost(RetimedCost):
    """A cost model with its times multiplied by what measured times were to predicted ones.

    At a measured degree and quota the whole ratio holds; away from it, its logarithm shrinks by e for every
    ``reach`` of distance, the sum of the logarithms of both ratios to the measured point. Interference is
    the corrected time's share where a form is one, since it is asked with that time.
    """

    def __init__(self, cost: Cost, ratios: Mapping[tuple[str, Phase], Mapping[_Point, float]], *, reach: float) -> None:
        """Takes measured over predicted time by module, phase, and (degree, quota)."""
        super().__init__(cost)
        self.ratios = {key: dict(points) for key, points in ratios.items()}
        self.reach = reach

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the corrected time alone, in milliseconds."""
        return self.base.time_ms(module, phase, degree, quota) * self.ratio(module, phase, degree, quota)

    def ratio(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns what a time is multiplied by; points far from every measured one keep 1."""
        points = self.ratios.get((module, phase), {})
        if (degree, quota) in points:
            return points[degree, quota]
        weights = {
            point: math.exp(-(abs(math.log(degree / point[0])) + abs(math.log(quota / point[1]))) / self.reach)
            for point in points
        }
        total = math.fsum(weight * math.log(points[point]) for point, weight in weights.items())
        return math.exp(total / max(1.0, math.fsum(weights.values())))


def with_measured(cost: Cost, plan: Plan, measured: MeasuredTimes, *, reach: float = 2.0) -> CorrectedCost:
    """Corrects a cost model by the measured times of a plan that was made with it.

    Args:
        cost: The model that ``plan`` was made with; one that was corrected before keeps what it knows.
        plan: What was run.
        measured: Milliseconds of each module's phases beside the plan's neighbours. A phase that was predicted or
            measured to take no time is left as it is.
        reach: How far a ratio is trusted away from where it was measured: its logarithm shrinks by e
            over a factor of e**reach in quota or degree.

    Raises:
        ValueError: ``reach`` is not above 0, or a measured time is negative, not finite, or of a module that the plan
            does not have.
    """
    if not 0 < reach < math.inf:
        raise ValueError(f"reach={reach}; use a finite number above 0")
    before = cost if isinstance(cost, CorrectedCost) else CorrectedCost(cost, {}, reach=reach)
    ratios = {key: dict(points) for key, points in before.ratios.items()}
    placements = {placement.module: placement for placement in plan.placements}
    for (module, phase), time_ms in measured.items():
        if module not in placements or not 0 <= time_ms < math.inf:
            raise ValueError(f"{module!r} {phase} measured as {time_ms} ms; give finite times of the plan's modules")
        placement = placements[module]
        predicted_ms = placement.forward_ms if phase is Phase.FORWARD else placement.backward_ms
        if predicted_ms > 0 and time_ms > 0:
            point = (placement.degree, placement.quota)
            known = before.ratio(module, phase, *point)
            ratios.setdefault((module, phase), {})[point] = known * time_ms / predicted_ms
    return CorrectedCost(before.base, ratios, reach=reach)
