"""Measured times of a plan, put back into the cost model, and the plan made again.

A prediction that is off makes a solver prefer what it underestimates. Measuring the plan shows where; solving again
with that corrected recovers most of what the errors cost in one or two rounds (``bench/README.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mosaic.cost import Cost
from mosaic.cost.retimed import RetimedCost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.solver.solve import solve
from mosaic.solver.task import SearchOptions

Measured = Mapping[tuple[str, Phase], float]
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


def with_measured(cost: Cost, plan: Plan, measured: Measured, *, reach: float = 2.0) -> CorrectedCost:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A plan that was made, and what it was measured to take."""

    plan: Plan
    """With the times that were predicted when it was made."""
    measured: Measured
    """Milliseconds of its modules."""
    measured_ms: float
    """Its stages with the measured times: slowest forward plus slowest backward of each."""


def replan(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    measure: Callable[[Plan], Measured],
    *,
    num_devices: int = 1,
    rounds: int = 2,
    reach: float = 2.0,
    search: SearchOptions | None = None,
) -> tuple[Round, ...]:
    """Plans, measures, corrects and plans again, until the plan stays or the rounds are over.

    Args:
        graph: What to place.
        cost: Predictions to begin with.
        device: What one of the devices is.
        measure: Runs a plan and returns the times of its modules.
        num_devices: How many devices.
        rounds: Plans to make after the first.
        reach: See ``with_measured``.
        search: How to search.

    Returns:
        What was made and measured, in order; ``best_round`` picks the one to keep.
    """
    done: list[Round] = []
    seen: set[object] = set()
    for _ in range(rounds + 1):
        plan = solve(graph, cost, device, num_devices=num_devices, search=search)
        key = tuple((p.module, p.cells) for p in plan.placements), tuple(stage.names for stage in plan.stages)
        if key in seen:
            break
        seen.add(key)
        measured = measure(plan)
        done.append(Round(plan=plan, measured=measured, measured_ms=measured_step_ms(plan, measured)))
        cost = with_measured(cost, plan, measured, reach=reach)
    return tuple(done)


def best_round(rounds: tuple[Round, ...]) -> Round:
    """Returns the round that measured fastest; the first of equals."""
    return min(rounds, key=lambda one: one.measured_ms)


def measured_step_ms(plan: Plan, measured: Measured) -> float:
    """Returns a plan's stages with measured times in place of predicted ones, where there are any."""
    total = 0.0
    for stage in plan.stages:
        for phase in Phase:
            times = [
                measured.get((p.module, phase), p.forward_ms if phase is Phase.FORWARD else p.backward_ms)
                for p in stage.placements
            ]
            total += max(times, default=0.0)
    return total
