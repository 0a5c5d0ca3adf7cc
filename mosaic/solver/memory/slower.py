"""Stages whose modules get fewer slots, so that there are devices that hold what all of them keep.

Where the best stages fit on no devices, mostly the slots are too full to choose devices by their memory. A little more
time for a stage frees slots: all stages are slowed down by the least factor at which there are devices, and then one
after the other is made as fast again as the rest allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mosaic.solver.memory.holding import Stages, place_anew
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine, StageResult

MAX_FACTOR = 8.0
_HALVINGS = 5


def place_slower(
    stages: Stages, options: Mapping[str, Sequence[DeploymentOption]], machine: Machine, *, ends: float = math.inf
) -> Stages | None:
    """Returns the stages at the same degrees with as few slots as some more time allows; None where nothing was found.

    Args:
        stages: Of a plan that fits on no devices.
        options: Of each module.
        machine: What there is.
        ends: When to give up, on ``time.perf_counter``'s clock.
    """

    def at(factors: Sequence[float]) -> Stages | None:
        slower = tuple(_slower(stage, options, factor) for stage, factor in zip(stages, factors, strict=True))
        return place_anew(slower, machine, ends=ends)

    count = len(stages)
    factors = [MAX_FACTOR] * count
    found = at(factors)
    for which in (range(count), *([index] for index in range(count))):
        low, high = 1.0, factors[which[0]]
        for factor in (1.0, *[0.0] * _HALVINGS):  # no slower at first, and then between
            if found is None or high == 1.0:
                break
            tried = factor or math.sqrt(low * high)
            changed = [tried if index in which else old for index, old in enumerate(factors)]
            better = at(changed)
            low, high = (tried, high) if better is None else (low, tried)
            found, factors = (found, factors) if better is None else (better, changed)
    return found


def _slower(stage: StageResult, options: Mapping[str, Sequence[DeploymentOption]], factor: float) -> StageResult:
    """The same with each module at the least quota at which it keeps the stage's times, made longer."""
    forward = factor * max(option.forward_ns for option, _ in stage.choices.values())
    backward = factor * max(option.backward_ns for option, _ in stage.choices.values())
    choices = {}
    for name, (chosen, devices) in stage.choices.items():
        meets = [
            o
            for o in options[name]
            if o.degree == chosen.degree and o.forward_ns <= forward and o.backward_ns <= backward
        ]
        choices[name] = (min(meets, key=lambda o: (o.quota, o.latency_ns)), devices)
    return replace(stage, choices=choices, latency_ns=max(option.latency_ns for option, _ in choices.values()))
