"""Which slots a module gets: one contiguous run, the same on each of its devices (paper Eq. 6, symmetry).

On one or two devices any quotas that fit (Eq. 5) can be laid out so; on three or more not always: three modules
on the device pairs {0, 1}, {1, 2}, {0, 2} with one of two slots each fit by number, yet every two of them meet.
"""

from __future__ import annotations

from collections.abc import Mapping

from mosaic.solver.options import DeploymentOption

Choice = tuple[DeploymentOption, tuple[int, ...]]
"""A module's option and the devices it is on."""


def first_fit(choices: Mapping[str, Choice], num_slots: int) -> dict[str, int] | None:
    """Gives every module the lowest free run of slots, most devices first.

    Returns:
        The first slot of each module, or None where this order leads into a gap that is too small; another
        assignment may still exist.
    """
    runs: dict[int, list[tuple[int, int]]] = {}
    starts: dict[str, int] = {}
    order = sorted(choices, key=lambda name: (-choices[name][0].degree, choices[name][1], -choices[name][0].quota))
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
