"""A cost model's prediction for an allocation: stages with their placements and times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, Stage
from mosaic.profile import Phase
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Choice, Machine, StageResult, lay_out

Times = tuple[float, float]
"""Forward and backward, in milliseconds."""
_Beside = tuple[tuple[str, int], ...]


class PlacedTimes:
    """Times of modules beside their neighbours; each is asked of the cost model once, which must not change."""

    def __init__(self, cost: Cost) -> None:
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
                self._beside(name, option, tuple(neighbour for neighbour in group if neighbour[0] != name))
                for group in {groups[device] for device in devices}
            ]
            times[name] = max(forward for forward, _ in own), max(backward for _, backward in own)
        return times

    def stage_ms(self, choices: Mapping[str, Choice]) -> float:
        """Returns the slowest forward plus the slowest backward, in milliseconds."""
        times = self.of(choices).values()
        return max(forward for forward, _ in times) + max(backward for _, backward in times)

    def total_ms(self, stages: Sequence[StageResult]) -> float:
        """Returns what stages take one after the other, in milliseconds."""
        return sum(self.stage_ms(stage.choices) for stage in stages)

    def _beside(self, name: str, option: DeploymentOption, beside: _Beside) -> Times:
        key = (name, option.degree, option.quota, beside)
        times = self._known.get(key)
        if times is None:
            ask = self._cost.placed_ms
            times = self._known[key] = (
                ask(name, Phase.FORWARD, option.degree, option.quota, beside=beside),
                ask(name, Phase.BACKWARD, option.degree, option.quota, beside=beside),
            )
        return times


def build_stage(result: StageResult, times: PlacedTimes) -> Stage:
    """Turns an allocation into placements with the times predicted beside their neighbours."""
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
        predicted = times.of(choices)
        return Stage(
            placements=tuple(
                replace(placed, forward_ms=predicted[placed.module][0], backward_ms=predicted[placed.module][1])
                for placed in stage.placements
            )
        )

    return replace(plan, stages=tuple(map(of, plan.stages)))


def with_communication(plan: Plan, cost: RankedCost) -> Plan:
    """Returns a plan that says which part of its times is communication; the times have it already."""

    def with_shares(placed: Placement) -> Placement:
        sent, share = cost.communication(placed.module, placed.degree, placed.quota), placed.part.share
        return replace(
            placed,
            route_forward_ms=share * sent.route_forward_ms,
            route_backward_ms=share * sent.route_backward_ms,
            reduce_ms=share * sent.reduce_ms,
        )

    stages = tuple(Stage(placements=tuple(map(with_shares, stage.placements))) for stage in plan.stages)
    return replace(plan, stages=stages)


def spend_spare_slots(
    result: StageResult, options: Mapping[str, Sequence[DeploymentOption]], *, times: PlacedTimes, machine: Machine
) -> StageResult:
    """Gives idle slots of a stage to modules that gain from them, the best step first, while something gets faster.

    Algorithm 1 stops at options that meet the stage's latency, usually the smallest. A module that is not the slowest
    may use more: its consumers can start earlier, and a plan is timed with a maximum for each phase.

    Devices and degrees stay. A step is taken only if the stage's predicted time (slowest forward plus slowest
    backward, with interference) does not rise, so the stage never gets slower. ``latency_ns`` stays what
    the search found.
    """
    choices: Mapping[str, Choice] = result.choices
    value = _value(choices, times)
    same = {
        name: sorted((o for o in options[name] if o.degree == option.degree), key=lambda o: o.quota)
        for name, (option, _) in choices.items()
    }
    while True:
        steps = [(_value(wider, times), wider) for wider in _widened(choices, same, machine)]
        best_value, best = min(steps, key=lambda step: step[0], default=(value, choices))
        if best_value >= value:
            break
        value, choices = best_value, best
    if choices is result.choices:
        return result
    return replace(result, choices=choices, starts=lay_out(choices, machine.num_slots))


def _widened(
    choices: Mapping[str, Choice], same: Mapping[str, Sequence[DeploymentOption]], machine: Machine
) -> Iterator[Mapping[str, Choice]]:
    """Yields the choices with one module at its next larger quota, for each module for which there is room.

    ``same`` has each module's options of its degree, by rising quota.
    """
    used = [0] * machine.num_devices
    for option, devices in choices.values():
        for device in devices:
            used[device] += option.quota
    for name, (option, devices) in choices.items():
        spare = machine.num_slots - max(used[device] for device in devices)
        if spare == 0:
            continue
        most = option.quota + spare
        wider = next((o for o in same[name] if o.quota > option.quota), None)
        if wider is not None and wider.quota <= most:
            yield {**choices, name: (wider, devices)}


def _value(choices: Mapping[str, Choice], times: PlacedTimes) -> Times:
    pairs = times.of(choices).values()
    longest_ms = max(forward for forward, _ in pairs) + max(backward for _, backward in pairs)
    return longest_ms, sum(forward + backward for forward, backward in pairs)
