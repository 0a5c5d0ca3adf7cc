"""Slots that a finished stage leaves idle, given to the modules that gain from them.

Algorithm 1 stops at options that meet the stage's latency, usually the smallest. A module that is not
the slowest then has fewer slots than it could have, although its consumers could start earlier, a
prediction may be off, and a plan is timed with a maximum for each phase rather than one for their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mosaic.solver.options import DeploymentOption
from mosaic.solver.predict import PlacedTimes
from mosaic.solver.slots import Choice, lay_out
from mosaic.solver.stage import Machine, StageResult

_Value = tuple[float, float]
"""Predicted time of a stage, then the sum of its modules' times; in milliseconds, less is better."""


def spend_spare_slots(
    result: StageResult, options: Mapping[str, Sequence[DeploymentOption]], *, times: PlacedTimes, machine: Machine
) -> StageResult:
    """Widens one module at a time, the best step first, while something gets faster.

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


def _value(choices: Mapping[str, Choice], times: PlacedTimes) -> _Value:
    found = times.of(choices).values()
    forward, backward = max(one[0] for one in found), max(one[1] for one in found)
    return forward + backward, sum(one[0] + one[1] for one in found)
