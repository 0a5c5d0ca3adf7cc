"""Slots that a finished stage leaves idle, given to the modules that gain from them.

Algorithm 1 stops at options that meet the stage's latency, usually the smallest. A module that is not
the slowest then has fewer slots than it could have, although its consumers could start earlier, a
prediction may be off, and a plan is timed with a maximum for each phase rather than one for their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mosaic.cost import Cost
from mosaic.solver.options import DeploymentOption
from mosaic.solver.placement import Machine
from mosaic.solver.predict import build_stage
from mosaic.solver.slots import lay_out
from mosaic.solver.stage_eval import StageResult

_Value = tuple[float, float]
"""Predicted time of a stage, then the sum of its modules' times; in milliseconds, less is better."""


def spend_spare_slots(
    result: StageResult, options: Mapping[str, Sequence[DeploymentOption]], *, cost: Cost, machine: Machine
) -> StageResult:
    """Widens one module at a time, the best step first, while something gets faster.

    Devices and degrees stay. A step is taken only if the stage's predicted time (slowest forward plus slowest
    backward, with interference) does not rise, so the stage never gets slower. ``latency_ns`` stays what
    the search found.
    """
    value = _value(result, cost)
    while True:
        steps = [(_value(wider, cost), wider) for wider in _widened(result, options, machine)]
        best_value, best = min(steps, key=lambda step: step[0], default=(value, result))
        if best_value >= value:
            return result
        value, result = best_value, best


def _widened(
    result: StageResult, options: Mapping[str, Sequence[DeploymentOption]], machine: Machine
) -> Iterator[StageResult]:
    """Yields the stage with one module at its next larger quota, for each module for which there is room."""
    used = [0] * machine.num_devices
    for option, devices in result.choices.values():
        for device in devices:
            used[device] += option.quota
    for name, (option, devices) in result.choices.items():
        room = option.quota + min(machine.num_slots - used[device] for device in devices)
        larger = [o for o in options[name] if o.degree == option.degree and option.quota < o.quota <= room]
        if not larger:
            continue
        choices = {**result.choices, name: (min(larger, key=lambda o: o.quota), devices)}
        yield replace(result, choices=choices, starts=lay_out(choices, machine.num_slots))


def _value(result: StageResult, cost: Cost) -> _Value:
    stage = build_stage(result, cost)
    return stage.forward_ms + stage.backward_ms, sum(p.forward_ms + p.backward_ms for p in stage.placements)
