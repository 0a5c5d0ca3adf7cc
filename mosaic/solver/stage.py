"""One stage: the machine that it has to fit on, the allocation of its modules, and their slots on each device.

A partition is any set of slots, and a module's quota is the same on all of its devices (paper Eq. 6), but which slots
they are may differ: nothing ties a slot of one device to the same slot of another. So whatever fits by number
(Eq. 5) can be laid out. Where one run of slots can be had on all devices, that is taken, since it reads better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mosaic.plan import Stage
from mosaic.solver.options import DeploymentOption

Choice = tuple[DeploymentOption, tuple[int, ...]]
"""A module's option and the devices it is on."""

Starts = tuple[int, ...]
"""First slot of a module's run on each of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices that a stage has to fit on."""

    num_devices: int
    """Devices, all alike."""
    num_slots: int
    """Slots of each."""
    memory_bytes: int
    """Memory of each in bytes; 0 where unknown, which then limits nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """The best allocation of one stage."""

    latency_ns: int
    """Time of its slowest module, forward and backward, beside the others; in nanoseconds."""
    choices: Mapping[str, Choice]
    """Option and devices of each module."""
    starts: Mapping[str, Starts]
    """First slot of each module on each of its devices."""

    def beside(self, name: str, device: int) -> list[tuple[str, int]]:
        """Returns the neighbours of a module on one device, each with its quota in slots."""
        return [(n, o.quota) for n, (o, devices) in self.choices.items() if n != name and device in devices]


def alone(name: str, options: Sequence[DeploymentOption]) -> StageResult:
    """Returns the stage of one module alone at its fastest, on as few slots as that takes."""
    least = min(option.forward_ns + option.backward_ns for option in options)
    fastest = [option for option in options if option.forward_ns + option.backward_ns == least]
    best = min(fastest, key=lambda option: (option.area, option))
    choice = (best, tuple(range(best.degree)))
    return StageResult(latency_ns=best.latency_ns, choices={name: choice}, starts={name: (0,) * best.degree})


def lay_out(choices: Mapping[str, Choice], num_slots: int) -> dict[str, Starts]:
    """Gives each module a contiguous run of slots on each of its devices.

    Args:
        choices: Options and devices whose quotas sum to at most ``num_slots`` on every device.
        num_slots: Slots of a device.
    """

    def rank(name: str) -> tuple[int, tuple[int, ...], int]:
        option, devices = choices[name]
        return -option.degree, devices, -option.quota

    orders = (sorted(choices, key=rank), sorted(choices, key=lambda name: (-choices[name][0].area, rank(name))))
    for order in orders:
        starts = _first_fit(choices, order, num_slots)
        if starts is not None:
            return starts
    return _stack(choices, orders[0])


def _first_fit(choices: Mapping[str, Choice], order: Sequence[str], num_slots: int) -> dict[str, Starts] | None:
    """Gives every module in turn the lowest run of slots that is free on all of its devices."""
    runs: dict[int, list[tuple[int, int]]] = {}
    starts: dict[str, Starts] = {}
    for name in order:
        option, devices = choices[name]
        start = 0
        for first, end in sorted(run for device in devices for run in runs.get(device, [])):
            if first - start >= option.quota:
                break
            start = max(start, end)
        if start + option.quota > num_slots:
            return None
        starts[name] = (start,) * len(devices)
        for device in devices:
            runs.setdefault(device, []).append((start, start + option.quota))
    return starts


def _stack(choices: Mapping[str, Choice], order: Sequence[str]) -> dict[str, Starts]:
    """Puts runs on top of each other, on each device for itself."""
    top: dict[int, int] = {}
    starts: dict[str, Starts] = {}
    for name in order:
        option, devices = choices[name]
        starts[name] = tuple(top.get(device, 0) for device in devices)
        for device in devices:
            top[device] = top.get(device, 0) + option.quota
    return starts


def start_early(stages: Sequence[Stage], *, num_devices: int, num_slots: int) -> tuple[Stage, ...]:
    """Moves each module to the run of slots that earlier stages leave first.

    No barrier ends a stage: a module starts when its inputs are there and its slots are free. Quotas, devices and times
    stay. A stage whose modules do not all fit as runs keeps its slots.
    """
    busy_ms = [[0.0] * num_slots for _ in range(num_devices)]
    moved = []
    for stage in stages:
        moved.append(_on_free_slots(stage, busy_ms, num_slots) or stage)
        for placement in moved[-1].placements:
            cells = [(device, slot) for device in placement.devices for slot in placement.slots_on(device)]
            end_ms = max(busy_ms[device][slot] for device, slot in cells) + placement.forward_ms + placement.backward_ms
            for device, slot in cells:
                busy_ms[device][slot] = end_ms
    return tuple(moved)


def _on_free_slots(stage: Stage, busy_ms: Sequence[Sequence[float]], num_slots: int) -> Stage | None:
    """Returns the stage with wide and long modules first on the slots that are free first; None: one does not fit."""
    taken: set[tuple[int, int]] = set()
    slots: dict[str, tuple[int, ...]] = {}
    for placement in sorted(stage.placements, key=lambda p: (-p.quota, -p.forward_ms - p.backward_ms, p.module)):
        runs = [tuple(range(start, start + placement.quota)) for start in range(num_slots - placement.quota + 1)]
        cells = {run: {(device, slot) for device in placement.devices for slot in run} for run in runs}
        free = [run for run in runs if taken.isdisjoint(cells[run])]
        if not free:
            return None
        best = min(free, key=lambda run: max(busy_ms[device][slot] for device, slot in cells[run]))
        slots[placement.module] = best
        taken |= cells[best]
    return Stage(placements=tuple(replace(p, slots=slots[p.module], slots_by_device=()) for p in stage.placements))
