"""Which slots a module gets: one contiguous run, the same on each of its devices (paper Eq. 6, symmetry).

On one or two devices any quotas that fit (Eq. 5) can be laid out so; on three or more not always: three modules
on the device pairs {0, 1}, {1, 2}, {0, 2} with one of two slots each fit by number, yet every two of them meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.solver.options import DeploymentOption

Choice = tuple[DeploymentOption, tuple[int, ...]]
"""A module's option and the devices it is on."""


def lay_out(choices: Mapping[str, Choice], num_slots: int) -> dict[str, int] | None:
    """Finds the first slot of each module: by first fit where that does, else exactly.

    First fit with the modules on most devices first never fails on one or two devices.

    Returns:
        First slots, or None where these options on these devices cannot be laid out at all.
    """

    def rank(name: str) -> tuple[int, tuple[int, ...], int]:
        option, devices = choices[name]
        return -option.degree, devices, -option.quota

    orders = (sorted(choices, key=rank), sorted(choices, key=lambda name: (-choices[name][0].area, rank(name))))
    for order in orders:
        starts = _first_fit(choices, order, num_slots)
        if starts is not None:
            return starts
    return _lay_out_exactly(choices, num_slots)


def _first_fit(choices: Mapping[str, Choice], order: Sequence[str], num_slots: int) -> dict[str, int] | None:
    """Gives every module in turn the lowest run of slots that is free on all of its devices."""
    runs: dict[int, list[tuple[int, int]]] = {}
    starts: dict[str, int] = {}
    for name in order:
        option, devices = choices[name]
        start = 0
        for first, end in sorted(run for device in devices for run in runs.get(device, [])):
            if first - start >= option.quota:
                break
            start = max(start, end)
        if start + option.quota > num_slots:
            return None
        starts[name] = start
        for device in devices:
            runs.setdefault(device, []).append((start, start + option.quota))
    return starts


def _lay_out_exactly(choices: Mapping[str, Choice], num_slots: int) -> dict[str, int] | None:
    """Searches depth first: each module starts at slot 0 or where another one ends.

    In any layout every module can be moved down until it meets slot 0 or the end of another, so no other
    starts need trying. Gives up after a fixed number of steps; what it then misses, CP-SAT still finds.
    """
    steps = 20_000
    placed: dict[str, int] = {}

    def is_free(name: str, start: int) -> bool:
        option, devices = choices[name]
        if start + option.quota > num_slots:
            return False
        return all(
            start + option.quota <= other or other + choices[n][0].quota <= start
            for n, other in placed.items()
            if not set(devices).isdisjoint(choices[n][1])
        )

    def descend() -> bool:
        nonlocal steps
        if len(placed) == len(choices):
            return True
        ends = sorted({0, *(start + choices[name][0].quota for name, start in placed.items())})
        # Bottom-up order: the next module never starts below the last one placed.
        last = max(placed.values(), default=0)
        for start in (end for end in ends if end >= last):
            for name in choices:
                if name in placed or not is_free(name, start):
                    continue
                steps -= 1
                if steps < 0:
                    return False
                placed[name] = start
                if descend():
                    return True
                del placed[name]
        return False

    return placed if descend() else None
