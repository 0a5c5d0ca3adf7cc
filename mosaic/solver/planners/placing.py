"""Which devices a job gets: near its data, inside one island, where least memory is taken, and where all fits.

Spindle (arXiv 2409.03365), section 3.5, greedy and wave by wave: a job stays inside an island where it can; best are
the devices that hold its own last slice or its producers; then those with least memory taken. The cost model has no
price for where a module is, so placement changes no prediction, and every job fits by itself: the paper's
backtracking on a device that is out of memory is left out. Larger jobs are placed first (no volumes are known).

Whether devices hold all of it over the whole step follows the rule of every plan (``holding.py``): what modules keep is
there during the whole step. A slice of a module keeps its share of that, on the devices that run it, and works with as
much as the whole module does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mosaic.errors import InfeasibleError
from mosaic.solver.memory.holding import Stages, fits, held_bytes, place_anew, swap_labels
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import DraftWave, Job
from mosaic.solver.stage import Machine, StageResult

Homes = list[list[tuple[int, ...]]]
"""Devices of every job of every wave."""


def place_waves(
    waves: Sequence[DraftWave],
    predecessors: Callable[[str], Sequence[str]],
    *,
    num_devices: int,
    island_size: int,
) -> Homes:
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


def within_memory(planner: str, waves: Sequence[DraftWave], homes: Homes, machine: Machine) -> Homes:
    """Returns devices that hold the waves: the same, or others, since times do not depend on which these are.

    Raises:
        InfeasibleError: No devices were found that hold what the planner chose.
    """
    stages = tuple(_as_stage(n, wave, own, machine) for n, (wave, own) in enumerate(zip(waves, homes, strict=True)))
    if fits(stages, machine):
        return homes
    found = swap_labels(stages, machine) or place_anew(stages, machine)
    if found is None:
        raise _refusal(planner, stages, machine)
    return [
        [stage.choices[f"{wave}.{job}"][1] for job in range(len(stage.choices))] for wave, stage in enumerate(found)
    ]


def _as_stage(number: int, wave: DraftWave, homes: Sequence[tuple[int, ...]], machine: Machine) -> StageResult:
    """A wave's jobs as modules with names unlike any other of the waves."""
    choices = {
        f"{number}.{index}": (_memory_of(job, machine), devices)
        for index, (job, devices) in enumerate(zip(wave, homes, strict=True))
    }
    starts = {name: (0,) * len(devices) for name, (_, devices) in choices.items()}
    return StageResult(latency_ns=0, choices=choices, starts=starts)


def _memory_of(job: Job, machine: Machine) -> DeploymentOption:
    """A job as one option: what all of its parts keep, and what one of them works with.

    It holds all slots, whatever its quota: jobs of a wave share no device.
    """
    kept = sum(-(-job.option.kept_bytes * part.count // part.total) for part in job.parts)
    return DeploymentOption(
        degree=job.option.degree,
        quota=machine.num_slots,
        forward_ns=0,
        backward_ns=0,
        memory_bytes=kept + job.option.working_bytes,
        kept_bytes=kept,
    )


def _refusal(planner: str, stages: Stages, machine: Machine) -> InfeasibleError:
    held = held_bytes(stages, machine.num_devices)
    fullest = held.index(max(held))
    return InfeasibleError(
        f"what {planner} plans does not fit into the devices' memory",
        reasons=[
            f"with what modules keep across waves, device {fullest} holds {held[fullest]:,} bytes at its fullest and "
            f"has {machine.memory_bytes:,}, and no other devices for its jobs were found that hold them: {planner} "
            "does not choose degrees by memory; use more devices or a smaller batch, or the exact search, which does"
        ],
    )
