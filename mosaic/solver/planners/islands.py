"""Which devices a job gets: near its data, inside one island, where least memory is taken.

Spindle (arXiv 2409.03365), section 3.5, greedy and wave by wave: a job stays inside an island where it can; best are
the devices that hold its own last slice or its producers; then those with least memory taken. The cost model has no
price for where a module is, so placement changes no prediction, and every job fits by itself: the paper's
backtracking on a device that is out of memory is left out. Larger jobs are placed first (no volumes are known).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mosaic.solver.planners.draft import DraftWave, Job


def place_waves(
    waves: Sequence[DraftWave],
    predecessors: Callable[[str], Sequence[str]],
    *,
    num_devices: int,
    island_size: int,
) -> list[list[tuple[int, ...]]]:
    """Returns the devices of every job of every wave, disjoint within a wave.

    Args:
        waves: Jobs; those of one wave need no more devices than there are.
        predecessors: What feeds a module.
        num_devices: Devices.
        island_size: Neighbouring devices that make an island; the last one may be smaller.
    """
    home: dict[str, tuple[int, ...]] = {}
    taken = [0] * num_devices
    held: set[tuple[str, int]] = set()
    placed = []
    for wave in waves:
        free = set(range(num_devices))
        found: dict[int, tuple[int, ...]] = {}
        for place in sorted(range(len(wave)), key=lambda index: (-wave[index].option.degree, index)):
            job = wave[place]
            wanted = _wanted(job, home, predecessors)
            devices = _choose(job.option.degree, free, wanted, taken, island_size)
            free -= set(devices)
            found[place] = devices
            for name in job.names:
                home[name] = devices
                for device in devices:
                    if (name, device) not in held:  # slices of one module share their parameters
                        held.add((name, device))
                        taken[device] += job.option.memory_bytes
        placed.append([found[place] for place in range(len(wave))])
    return placed


def _wanted(job: Job, home: dict[str, tuple[int, ...]], predecessors: Callable[[str], Sequence[str]]) -> set[int]:
    own = home.get(job.names[0])
    if own is not None:
        return set(own)
    return {device for name in predecessors(job.names[0]) for device in home.get(name, ())}


def _choose(degree: int, free: set[int], wanted: set[int], taken: Sequence[int], island_size: int) -> tuple[int, ...]:
    def rank(device: int) -> tuple[bool, int, int]:
        return device not in wanted, taken[device], device

    islands: dict[int, list[int]] = {}
    for device in sorted(free, key=rank):
        islands.setdefault(device // island_size, []).append(device)
    roomy = [members for members in islands.values() if len(members) >= degree]
    if roomy:
        # Most wanted devices, then the tightest fit, so that large jobs still find a whole island.
        best = min(roomy, key=lambda members: (-len(wanted & set(members[:degree])), len(members), min(members)))
        return tuple(sorted(best[:degree]))
    by_room = sorted(islands.values(), key=lambda members: (-len(members), min(members)))
    return tuple(sorted([device for members in by_room for device in members][:degree]))
