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


class Stagger:
    """Places one list of stages after another; what begins with the same stages begins with the same slots."""

    def __init__(self, *, num_devices: int, num_slots: int) -> None:
        """Takes the machine."""
        self._num_slots = num_slots
        self._given: list[Stage] = []
        self._placed: list[Stage] = []
        self._loads: list[Load] = [[[0.0] * num_slots for _ in range(num_devices)]]  # before each stage

    def place(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Returns the same stages with each module on the run of slots that has had the least to do so far.

        Runs stay contiguous and the same on all devices of a module. A stage whose modules do not all fit that way in
        order of their length keeps its slots.
        """
        same = 0
        while same < min(len(stages), len(self._given)) and stages[same] is self._given[same]:
            same += 1
        del self._given[same:], self._placed[same:], self._loads[same + 1 :]
        for stage in stages[same:]:
            load = [row.copy() for row in self._loads[-1]]
            moved = _place(stage, load, self._num_slots) or stage
            for placement in moved.placements:
                _add(placement, load)
            self._given.append(stage)
            self._placed.append(moved)
            self._loads.append(load)
        return tuple(self._placed)


def stagger(stages: Sequence[Stage], *, num_devices: int, num_slots: int) -> tuple[Stage, ...]:
    """Returns stages as ``Stagger.place`` does."""
    return Stagger(num_devices=num_devices, num_slots=num_slots).place(stages)


def _place(stage: Stage, load: Load, num_slots: int) -> Stage | None:
    taken = [0] * len(load)  # bits of slots, by device
    chosen: dict[str, Placement] = {}
    for placement in sorted(stage.placements, key=lambda p: (-p.quota, -_length(p), p.module)):
        quota, devices = placement.quota, placement.devices
        held = 0
        for device in devices:
            held |= taken[device]
        run = (1 << quota) - 1
        starts = [start for start in range(num_slots - quota + 1) if not held & run << start]
        if not starts:
            return None
        start = starts[0]
        if len(starts) > 1:
            busy = load[devices[0]] if len(devices) == 1 else list(map(max, *[load[device] for device in devices]))
            waits = [max(busy[first : first + quota]) for first in starts]
            start = starts[waits.index(min(waits))]
        slots = tuple(range(start, start + quota))
        is_there = slots == placement.slots and not placement.slots_by_device
        chosen[placement.module] = placement if is_there else replace(placement, slots=slots, slots_by_device=())
        for device in devices:
            taken[device] |= run << start
    return Stage(placements=tuple(chosen[name] for name in stage.names))


def _add(placement: Placement, load: Load) -> None:
    first, quota = placement.slots[0], placement.quota
    if not placement.slots_by_device and placement.slots[-1] - first < quota:  # one run, the same everywhere
        rows = [load[device] for device in placement.devices]
        ends = [max(max(row[first : first + quota]) for row in rows) + _length(placement)] * quota
        for row in rows:
            row[first : first + quota] = ends
        return
    held = [(load[device], placement.slots_on(device)) for device in placement.devices]
    end = max(row[slot] for row, slots in held for slot in slots) + _length(placement)
    for row, slots in held:
        for slot in slots:
            row[slot] = end


def _length(placement: Placement) -> float:
    return placement.forward_ms + placement.backward_ms
