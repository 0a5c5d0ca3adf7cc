"""Which slots a module gets on each of its devices.

A partition is any set of slots, and a module's quota is the same on all of its devices (paper Eq. 6), but which slots
they are may differ: nothing ties a slot of one device to the same slot of another. So whatever fits by number
(Eq. 5) can be laid out. Where one run of slots can be had on all devices, that is taken, since it reads better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.solver.options import DeploymentOption

Choice = tuple[DeploymentOption, tuple[int, ...]]
"""A module's option and the devices it is on."""

Starts = tuple[int, ...]
"""First slot of a module's run on each of its devices."""


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
