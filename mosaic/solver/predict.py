"""A cost model's prediction for an allocation: stages with their placements and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, Stage
from mosaic.profile import Phase
from mosaic.solver.options import DeploymentOption
from mosaic.solver.slots import Choice
from mosaic.solver.stage import StageResult

Times = tuple[float, float]
"""Forward and backward, in milliseconds."""
_Beside = tuple[tuple[str, int], ...]


class PlacedTimes:
    """What modules take beside their neighbours, each question asked of the cost model once.

    A cost model that changes in between needs another one of these.
    """

    def __init__(self, cost: Cost) -> None:
        """Takes what gives the times."""
        self._cost = cost
        self._is_alone = cost.interference.is_zero
        self._known: dict[tuple[str, int, int, _Beside], Times] = {}

    def of(self, choices: Mapping[str, Choice]) -> dict[str, Times]:
        """Returns what each module of a stage takes.

        Paper Eq. 7: of a module's devices the one with the worst neighbours decides, in each phase for itself.
        """
        if self._is_alone:
            return {name: self._beside(name, option, ()) for name, (option, _) in choices.items()}
        there: dict[int, list[tuple[str, int]]] = {}
        for name, (option, devices) in choices.items():
            for device in devices:
                there.setdefault(device, []).append((name, option.quota))
        groups = {device: tuple(here) for device, here in there.items()}
        times = {}
        for name, (option, devices) in choices.items():
            # Many devices have the same neighbours.
            own = [
                self._beside(name, option, tuple(one for one in group if one[0] != name))
                for group in {groups[device] for device in devices}
            ]
            times[name] = max(forward for forward, _ in own), max(backward for _, backward in own)
        return times

    def stage_ms(self, choices: Mapping[str, Choice]) -> float:
        """Returns the slowest forward plus the slowest backward, in milliseconds."""
        times = self.of(choices).values()
        return max(forward for forward, _ in times) + max(backward for _, backward in times)

    def _beside(self, name: str, option: DeploymentOption, beside: _Beside) -> Times:
        key = (name, option.degree, option.quota, beside)
        found = self._known.get(key)
        if found is None:
            ask = self._cost.placed_ms
            found = self._known[key] = (
                ask(name, Phase.FORWARD, option.degree, option.quota, beside=beside),
                ask(name, Phase.BACKWARD, option.degree, option.quota, beside=beside),
            )
        return found


def build_stage(result: StageResult, times: Cost | PlacedTimes) -> Stage:
    """Turns an allocation into placements with the times predicted beside their neighbours."""
    if not isinstance(times, PlacedTimes):
        times = PlacedTimes(times)
    placed = times.of(result.choices)
    placements = []
    for name, (option, devices) in result.choices.items():
        starts = result.starts[name]
        runs = tuple(tuple(range(start, start + option.quota)) for start in starts)
        placements.append(
            Placement(
                part=Part(module=name),
                slots=runs[0],
                grid=Grid(ranks=devices),
                slots_by_device=runs if len(set(starts)) > 1 else (),
                forward_ms=placed[name][0],
                backward_ms=placed[name][1],
            )
        )
    return Stage(placements=tuple(placements))


def retimed(plan: Plan, cost: Cost) -> Plan:
    """Returns a plan of whole modules with the times that a cost model predicts for it."""
    times = PlacedTimes(cost)

    def of(stage: Stage) -> Stage:
        choices = {
            placed.module: (
                DeploymentOption(degree=placed.degree, quota=placed.quota, forward_ns=0, backward_ns=0),
                placed.devices,
            )
            for placed in stage.placements
        }
        found = times.of(choices)
        return Stage(
            placements=tuple(
                replace(placed, forward_ms=found[placed.module][0], backward_ms=found[placed.module][1])
                for placed in stage.placements
            )
        )

    return replace(plan, stages=tuple(map(of, plan.stages)))


def with_communication(plan: Plan, cost: RankedCost) -> Plan:
    """Returns a plan that says which part of its times is communication; the times have it already."""

    def told(placed: Placement) -> Placement:
        found, share = cost.communication(placed.module, placed.degree, placed.quota), placed.part.share
        return replace(
            placed,
            route_forward_ms=share * found.route_forward_ms,
            route_backward_ms=share * found.route_backward_ms,
            reduce_ms=share * found.reduce_ms,
        )

    stages = tuple(Stage(placements=tuple(map(told, stage.placements))) for stage in plan.stages)
    return replace(plan, stages=stages)
