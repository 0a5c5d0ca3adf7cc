"""Choosing slots so that a stage's modules can start before the stage before has ended everywhere.

Quotas and times stay as they are; only which slots a module holds changes. No barrier ends a stage: a module starts
when its inputs are there and nobody holds its slots. So a short stage goes best where the one before ends first,
and one lane runs two short modules beside a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mosaic.plan import Placement, Stage

Load = list[list[float]]
"""Milliseconds of work so far, by device and slot."""


def stagger(stages: Sequence[Stage], *, num_devices: int, num_slots: int) -> tuple[Stage, ...]:
    """Returns the same stages with each module on the run of slots that has had the least to do so far.

    Runs stay contiguous and the same on all devices of a module. A stage whose modules do not all fit that way in
    order of their length keeps its slots.
    """
    load: Load = [[0.0] * num_slots for _ in range(num_devices)]
    result: list[Stage] = []
    for stage in stages:
        moved = _place(stage, load, num_slots) or stage
        for placement in moved.placements:
            _add(placement, load)
        result.append(moved)
    return tuple(result)


def _place(stage: Stage, load: Load, num_slots: int) -> Stage | None:
    free = [[True] * num_slots for _ in load]
    chosen: dict[str, Placement] = {}
    for placement in sorted(stage.placements, key=lambda p: (-p.quota, -_length(p), p.module)):
        starts = [
            start
            for start in range(num_slots - placement.quota + 1)
            if all(free[d][s] for d in placement.devices for s in range(start, start + placement.quota))
        ]
        if not starts:
            return None
        start = min(starts, key=lambda first: (_busiest(placement, first, load), first))
        slots = tuple(range(start, start + placement.quota))
        chosen[placement.module] = replace(placement, slots=slots, slots_by_device=())
        for device in placement.devices:
            for slot in slots:
                free[device][slot] = False
    return Stage(placements=tuple(chosen[name] for name in stage.names))


def _busiest(placement: Placement, start: int, load: Load) -> float:
    return max(load[d][s] for d in placement.devices for s in range(start, start + placement.quota))


def _add(placement: Placement, load: Load) -> None:
    end = max(load[device][slot] for device, slot in placement.cells) + _length(placement)
    for device, slot in placement.cells:
        load[device][slot] = end


def _length(placement: Placement) -> float:
    return placement.forward_ms + placement.backward_ms
