"""Devices of jobs: near what they read, inside one island, where parameters lie, and so that everything fits.

Spindle (arXiv 2409.03365), section 3.5, wave by wave. Of a wave the jobs with most bytes to read come first. A job
takes devices of one island (a node) where it can, best those that hold most of what it reads: its own last slice or its
producers, each weighed by its bytes; then those that hold parameters it shares; then those with least memory taken.
Where devices do not hold everything, a job takes the emptiest ones instead, and where that does not help, jobs before
it are placed anew (backtracking, ``MAX_RETURNS`` times at most). *Ours*: bytes that a graph does not know count as one
each, all alike; what slices of a module hand on counts, where it is not told, as what the module reads or makes,
whichever is more; and where all that finds nothing, every choice of devices is looked at, within the nodes of
``holding.py``.

The cost model has no price for where a module is, so placement changes no predicted time.

Whether devices hold all of it over the whole step follows the rule of every plan (``holding.py``): what modules keep is
there during the whole step. A slice of a module keeps its share of that, on the devices that run it, and works with as
much as the whole module does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mosaic.graph import Part
from mosaic.solver.memory.holding import assign_alone, place_anew
from mosaic.solver.memory.options import ALONE_NODES
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import DraftWave, Job, Sheet
from mosaic.solver.stage import Machine, StageResult

Devices = tuple[int, ...]
Homes = Sequence[Sequence[Devices]]
"""Devices of every job of every wave."""

MAX_RETURNS = 2000
"""Times that a job finds no room and one before it is placed anew, until locality is given up."""


def find_homes(waves: Sequence[DraftWave], sheet: Sheet, *, is_held: bool) -> Homes | None:
    """Returns the devices of every job of every wave, disjoint within a wave; None where none were found.

    Args:
        waves: Jobs; those of one wave need no more devices than there are.
        sheet: What they were drawn for.
        is_held: Whether devices have to hold what modules keep across waves.
    """
    machine = sheet.machine
    if sheet.settings.placement == "sequential":
        homes = [_in_a_row(wave) for wave in waves]
        if not is_held or _held(waves, homes, machine.num_devices) <= machine.memory_bytes:
            return homes
    else:
        found = _Placing(sheet, machine.memory_bytes if is_held else 0).place(waves)
        if found is not None:
            return found
    anywhere = place_anew(tuple(_as_stage(number, wave, machine) for number, wave in enumerate(waves)), machine)
    if anywhere is None:
        return None
    return [
        [stage.choices[f"{number}.{job}"][1] for job in range(len(stage.choices))]
        for number, stage in enumerate(anywhere)
    ]


def is_proven_homeless(waves: Sequence[DraftWave], machine: Machine) -> bool:
    """Whether no devices hold the waves, which was proven: not even with a wave for each job, where they work least."""
    options = {
        f"{number}.{index}": (_memory_of(job, machine),)
        for number, wave in enumerate(waves)
        for index, job in enumerate(wave)
    }
    placed, is_complete = assign_alone(options, machine, max_nodes=ALONE_NODES)
    return placed is None and is_complete


def _in_a_row(wave: DraftWave) -> list[Devices]:
    """Consecutive devices for one job after the other."""
    homes: list[Devices] = []
    first = 0
    for job in wave:
        homes.append(tuple(range(first, first + job.degree)))
        first += job.degree
    return homes


def _held(waves: Sequence[DraftWave], homes: Homes, num_devices: int) -> int:
    """The most that a device holds."""
    kept, working = [0] * num_devices, [0] * num_devices
    for wave, own in zip(waves, homes, strict=True):
        for job, devices in zip(wave, own, strict=True):
            for device in devices:
                kept[device] += job.kept_bytes
                working[device] = max(working[device], job.working_bytes)
    return max(map(sum, zip(kept, working, strict=True)))


class _Placing:
    """One job after the other; where one finds no room, those before it are placed anew."""

    def __init__(self, sheet: Sheet, memory_bytes: int) -> None:
        """Takes what waves were drawn for, and the memory of a device; 0 where nothing has to fit."""
        count, graph = sheet.num_devices, sheet.graph
        self._sheet, self._memory_bytes = sheet, memory_bytes
        self._homes: dict[str, list[Devices]] = {name: [] for name in graph.names}
        self._kept = [0] * count
        self._working = [[0] for _ in range(count)]  # the most so far, after each job
        self._parameters: list[Counter[str]] = [Counter() for _ in range(count)]
        self._reads: dict[str, dict[str, int]] = {name: {} for name in graph.names}
        makes = dict.fromkeys(graph.names, 1)
        for edge in graph.edges:
            self._reads[edge.target][edge.source] = edge.num_bytes or 1
            makes[edge.source] = max(makes[edge.source], edge.num_bytes or 1)
        like_its_ends = {name: max(makes[name], sum(self._reads[name].values())) for name in graph.names}
        self._hands_on = like_its_ends | dict(sheet.settings.layer_bytes)

    def place(self, waves: Sequence[DraftWave]) -> Homes | None:
        """Returns devices for all jobs; None where none were found."""
        order = [(number, index) for number, wave in enumerate(waves) for index in self._most_read_first(wave)]
        jobs = [waves[number][index] for number, index in order]
        ways: list[Iterator[Devices]] = []
        chosen: list[Devices] = []
        returns_left = MAX_RETURNS
        while len(chosen) < len(order):
            if len(ways) == len(chosen):
                here = order[len(chosen)][0]
                busy = {d for at, own in zip(order, chosen, strict=False) if at[0] == here for d in own}
                ways.append(self._ways(jobs[len(chosen)], busy))
            devices = next(ways[-1], None)
            if devices is not None:
                self._take(jobs[len(chosen)], devices)
                chosen.append(devices)
                continue
            ways.pop()
            returns_left -= 1
            if not ways or returns_left < 0:
                return None
            self._give_back(jobs[len(chosen) - 1], chosen.pop())
        found = dict(zip(order, chosen, strict=True))
        return [[found[number, index] for index in range(len(wave))] for number, wave in enumerate(waves)]

    def _most_read_first(self, wave: DraftWave) -> list[int]:
        def key(index: int) -> tuple[int, int, int]:
            return -sum(self._sources(wave[index].parts[0]).values()), -wave[index].degree, index

        return sorted(range(len(wave)), key=key)

    def _sources(self, part: Part) -> dict[str, int]:
        """Modules from which a part reads, with bytes; itself, where it is no first slice."""
        return {part.module: self._hands_on[part.module]} if part.first else self._reads[part.module]

    def _ways(self, job: Job, busy: set[int]) -> Iterator[Devices]:
        """Devices near a job's data, then those with least memory taken."""
        room = [device for device in range(self._sheet.num_devices) if device not in busy and self._takes(job, device)]
        if len(room) < job.degree:
            return
        near = self._near(job, room)
        yield near
        emptiest = sorted(room, key=lambda device: (self._taken(device), device))[: job.degree]
        if set(emptiest) != set(near):
            yield tuple(sorted(emptiest))

    def _near(self, job: Job, room: Sequence[int]) -> Devices:
        weights = self._weights(job)
        shared = {self._sheet.settings.parameters.get(name) for name in job.names} - {None}

        def rank(device: int) -> tuple[float, bool, int, int]:
            has_parameters = any(self._parameters[device][name] for name in shared if name is not None)
            return -weights.get(device, 0.0), not has_parameters, self._taken(device), device

        islands: dict[int, list[int]] = {}
        for device in sorted(room, key=rank):
            islands.setdefault(device // self._sheet.settings.island_size, []).append(device)
        roomy = [members for members in islands.values() if len(members) >= job.degree]
        if roomy:  # most of its data, then the tightest fit, so that large jobs still find a whole island
            best = min(
                roomy,
                key=lambda own: (-sum(weights.get(d, 0.0) for d in own[: job.degree]), len(own), min(own)),
            )
            return tuple(sorted(best[: job.degree]))
        by_room = sorted(islands.values(), key=lambda members: (-len(members), min(members)))
        return tuple(sorted([device for members in by_room for device in members][: job.degree]))

    def _weights(self, job: Job) -> dict[int, float]:
        """Bytes on each device of what a job reads."""
        weights: dict[int, float] = {}
        for source, num_bytes in self._sources(job.parts[0]).items():
            for devices in self._homes[source][-1:]:
                for device in devices:
                    weights[device] = weights.get(device, 0.0) + num_bytes / len(devices)
        return weights

    def _taken(self, device: int) -> int:
        return self._kept[device] + self._working[device][-1]

    def _takes(self, job: Job, device: int) -> bool:
        working = max(self._working[device][-1], job.working_bytes)
        return not self._memory_bytes or self._kept[device] + job.kept_bytes + working <= self._memory_bytes

    def _take(self, job: Job, devices: Devices) -> None:
        for name in dict.fromkeys(job.names):
            self._homes[name].append(devices)
        for device in devices:
            self._kept[device] += job.kept_bytes
            self._working[device].append(max(self._working[device][-1], job.working_bytes))
            self._parameters[device].update(self._sheet.settings.parameters.get(name, name) for name in job.names)

    def _give_back(self, job: Job, devices: Devices) -> None:
        for name in dict.fromkeys(job.names):
            self._homes[name].pop()
        for device in devices:
            self._kept[device] -= job.kept_bytes
            self._working[device].pop()
            self._parameters[device].subtract(self._sheet.settings.parameters.get(name, name) for name in job.names)


def _as_stage(number: int, wave: DraftWave, machine: Machine) -> StageResult:
    """A wave's jobs as modules with names unlike any other of the waves, on consecutive devices."""
    homes = dict(enumerate(_in_a_row(wave)))
    choices = {f"{number}.{index}": (_memory_of(job, machine), homes[index]) for index, job in enumerate(wave)}
    starts = {name: (0,) * len(devices) for name, (_, devices) in choices.items()}
    return StageResult(latency_ns=0, choices=choices, starts=starts)


def _memory_of(job: Job, machine: Machine) -> DeploymentOption:
    """A job as one option that holds all slots, whatever its quota: jobs of a wave share no device."""
    return DeploymentOption(
        degree=job.degree,
        quota=machine.num_slots,
        forward_ns=0,
        backward_ns=0,
        memory_bytes=job.kept_bytes + job.working_bytes,
        kept_bytes=job.kept_bytes,
    )
