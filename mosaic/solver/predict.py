"""A cost model's prediction for an allocation: stages with their placements and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, TemporalStage
from mosaic.profile import Phase
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Choice, Machine, StageResult

Times = tuple[float, float]
"""Forward and backward, in milliseconds."""
_Beside = tuple[tuple[str, int], ...]
_Runs = dict[str, tuple[tuple[int, ...], ...]]
"""Slots of each module on each of its devices."""


class PlacedTimes:
    """Cached times of modules beside their neighbours; the cost model must be constant."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._is_alone = cost.interference.is_zero
        self._beside = cache(self._placed_ms)

    def of(self, choices: Mapping[str, Choice]) -> dict[str, Times]:
        """Returns the times of each module of a stage.

        Paper Eq. 7: in each phase the device with the worst neighbours decides.
        """
        if self._is_alone:
            return {name: self._beside(name, option.degree, option.quota, ()) for name, (option, _) in choices.items()}
        residents: dict[int, list[tuple[str, int]]] = {}
        for name, (option, devices) in choices.items():
            for device in devices:
                residents.setdefault(device, []).append((name, option.quota))
        groups = {device: tuple(members) for device, members in residents.items()}
        times = {}
        for name, (option, devices) in choices.items():
            # many devices have the same neighbours
            own = [
                self._beside(name, option.degree, option.quota, tuple(other for other in group if other[0] != name))
                for group in {groups[device] for device in devices}
            ]
            times[name] = max(forward for forward, _ in own), max(backward for _, backward in own)
        return times

    def stage_ms(self, choices: Mapping[str, Choice]) -> float:
        """Returns the slowest forward plus the slowest backward, in milliseconds."""
        times = self.of(choices).values()
        return max(forward for forward, _ in times) + max(backward for _, backward in times)

    def total_ms(self, stages: Sequence[StageResult]) -> float:
        """Returns the time of stages one after the other, in milliseconds."""
        return sum(self.stage_ms(stage.choices) for stage in stages)

    def _placed_ms(self, name: str, degree: int, quota: int, beside: _Beside) -> Times:
        forward_ms, backward_ms = (self._cost.placed_ms(name, phase, degree, quota, beside=beside) for phase in Phase)
        return forward_ms, backward_ms


def build_stages(stages: Sequence[StageResult], times: PlacedTimes, machine: Machine) -> tuple[TemporalStage, ...]:
    """Converts allocations to placements: chooses slots, and predicts times beside neighbours.

    No barrier ends a stage: a module starts when its inputs are ready and its slots are free. So it gets the run of
    slots that earlier stages free first, if possible the same on all of its devices.
    """
    busy_ms = [[0.0] * machine.num_slots for _ in range(machine.num_devices)]
    built = []
    for stage in stages:
        placed = times.of(stage.choices)
        order = sorted(stage.choices, key=lambda name: (-stage.choices[name][0].quota, -sum(placed[name]), name))
        by_area = sorted(order, key=lambda name: -stage.choices[name][0].area)
        slots = (
            _free_runs(stage.choices, order, busy_ms)
            or _free_runs(stage.choices, by_area, busy_ms)
            or _stacked_runs(stage.choices, by_area)
        )
        placements = []
        for name, (_, devices) in stage.choices.items():
            runs, (forward_ms, backward_ms) = slots[name], placed[name]
            placements.append(
                Placement(
                    part=Part(module=name),
                    slots=runs[0],
                    grid=Grid(ranks=devices),
                    slots_by_device=runs if len(set(runs)) > 1 else (),
                    forward_ms=forward_ms,
                    backward_ms=backward_ms,
                )
            )
            cells = [(device, slot) for device, run in zip(devices, runs, strict=True) for slot in run]
            end_ms = max(busy_ms[device][slot] for device, slot in cells) + forward_ms + backward_ms
            for device, slot in cells:
                busy_ms[device][slot] = end_ms
        built.append(TemporalStage(placements=tuple(placements)))
    return tuple(built)


def _free_runs(choices: Mapping[str, Choice], order: Sequence[str], busy_ms: Sequence[Sequence[float]]) -> _Runs | None:
    """Assigns each module in turn the run that is free first on all of its devices; None: one does not fit."""
    occupied: set[tuple[int, int]] = set()
    runs: _Runs = {}
    for name in order:
        option, devices = choices[name]
        starts = range(len(busy_ms[0]) - option.quota + 1)
        cells = {start: {(g, slot) for g in devices for slot in range(start, start + option.quota)} for start in starts}
        free = [start for start in starts if occupied.isdisjoint(cells[start])]
        if not free:
            return None
        best = min(free, key=lambda start: max(busy_ms[device][slot] for device, slot in cells[start]))
        runs[name] = (tuple(range(best, best + option.quota)),) * option.degree
        occupied |= cells[best]
    return runs


def _stacked_runs(choices: Mapping[str, Choice], order: Sequence[str]) -> _Runs:
    """Assigns adjacent runs, on each device separately."""
    top: Counter[int] = Counter()
    runs: _Runs = {}
    for name in order:
        option, devices = choices[name]
        runs[name] = tuple(tuple(range(top[device], top[device] + option.quota)) for device in devices)
        top.update(dict.fromkeys(devices, option.quota))
    return runs


def retimed(plan: Plan, cost: Cost) -> Plan:
    """Returns a plan of whole modules with times predicted by a cost model."""
    times = PlacedTimes(cost)

    def of(stage: TemporalStage) -> TemporalStage:
        choices = {
            placed.module: (
                DeploymentOption(degree=placed.degree, quota=placed.quota, forward_ns=0, backward_ns=0),
                placed.devices,
            )
            for placed in stage.placements
        }
        predicted = times.of(choices)
        return TemporalStage(
            placements=tuple(
                replace(placed, forward_ms=predicted[placed.module][0], backward_ms=predicted[placed.module][1])
                for placed in stage.placements
            )
        )

    return replace(plan, stages=tuple(map(of, plan.stages)))


def with_communication(plan: Plan, cost: RankedCost) -> Plan:
    """Returns a plan with the communication in its times as separate fields."""

    def with_shares(placed: Placement) -> Placement:
        sent, share = cost.communication(placed.module, placed.degree, placed.quota), placed.part.share
        return replace(
            placed,
            route_forward_ms=share * sent.route_forward_ms,
            route_backward_ms=share * sent.route_backward_ms,
            reduce_ms=share * sent.reduce_ms,
        )

    stages = tuple(TemporalStage(placements=tuple(map(with_shares, stage.placements))) for stage in plan.stages)
    return replace(plan, stages=stages)


def spend_spare_slots(
    result: StageResult, options: Mapping[str, Sequence[DeploymentOption]], *, times: PlacedTimes, machine: Machine
) -> StageResult:
    """Assigns idle slots of a stage to modules that gain from them, the best step first.

    Algorithm 1 stops at options that meet the stage's latency, usually the smallest. Other modules than the slowest may
    use more: their consumers can start earlier.

    Devices and degrees do not change. A step is taken only if the stage's predicted time (slowest forward plus slowest
    backward, with interference) does not rise. ``latency_ns`` is not updated.
    """

    def value_of(choices: Mapping[str, Choice]) -> Times:
        return times.stage_ms(choices), sum(map(sum, times.of(choices).values()))

    choices: Mapping[str, Choice] = result.choices
    value = value_of(choices)
    same_degree = {
        name: sorted((o for o in options[name] if o.degree == option.degree), key=lambda o: o.quota)
        for name, (option, _) in choices.items()
    }
    while True:
        steps = [(value_of(wider), wider) for wider in _widened(choices, same_degree, machine)]
        best_value, best = min(steps, key=lambda step: step[0], default=(value, choices))
        if best_value >= value:
            break
        value, choices = best_value, best
    return replace(result, choices=choices)


def _widened(
    choices: Mapping[str, Choice], same_degree: Mapping[str, Sequence[DeploymentOption]], machine: Machine
) -> Iterator[Mapping[str, Choice]]:
    """Yields the choices with one module at its next larger quota, for each module with room.

    ``same`` has each module's options of its degree, by increasing quota.
    """
    used_slots: Counter[int] = Counter()
    for option, devices in choices.values():
        used_slots.update(dict.fromkeys(devices, option.quota))
    for name, (option, devices) in choices.items():
        spare = machine.num_slots - max(used_slots[device] for device in devices)
        wider = next((o for o in same_degree[name] if o.quota > option.quota), None)
        if wider is not None and wider.quota <= option.quota + spare:
            yield {**choices, name: (wider, devices)}
