"""Spindle-Optimus: devices to whichever task gains most from one more, the task-level baseline of the Spindle paper.

As the Spindle paper (arXiv 2409.03365, section 5.1) describes it, after Optimus (EuroSys 2018): each task starts with
the fewest devices that it can have, and the next valid increment goes to the largest marginal gain
(T(n) - T(n')) / (n' - n). A task runs its modules in turn on its devices, each at its best degree there. *Ours*: tasks
are spread over as many waves as is fastest, and where no tasks are given (``PlannerSettings.tasks``) each module is
one, level by level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mosaic.graph import Part
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import DraftWave, Job, Sheet, levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A task on a number of devices."""

    degree: int
    """Devices."""
    options: tuple[DeploymentOption, ...]
    """Of its modules, in turn."""

    @property
    def latency_ns(self) -> int:
        """Forward and backward of all."""
        return sum(option.latency_ns for option in self.options)


Tasks = Mapping[tuple[str, ...], Sequence[Way]]
"""Ways to run each task, by rising degree and falling time; a task is its modules, producers first."""


def draw(sheet: Sheet) -> Iterator[Sequence[DraftWave]]:
    """Draws the waves of tasks, those of a level beside each other."""
    order = sheet.graph.topological_order()
    given = sheet.settings.tasks or tuple((name,) for name in order)
    task_of = {name: tuple(other for other in order if other in task) for task in given for name in task}

    def waits_for(task: tuple[str, ...]) -> list[tuple[str, ...]]:  # tasks of several modules wait for no other one
        return [task_of[other] for name in task for other in sheet.graph.predecessors(name) if task_of[other] != task]

    ways = {task: _ways_of(task, sheet) for task in dict.fromkeys(task_of[name] for name in order)}
    yield [
        wave
        for level in levels(ways, waits_for)
        for wave in waves_of_level({task: ways[task] for task in level}, sheet.num_devices)
    ]


def _ways_of(task: Sequence[str], sheet: Sheet) -> list[Way]:
    """How a task may run: of each number of devices the best, without those that are no faster than fewer."""
    widths = [sheet.widths[name] for name in task]
    least = max(own[0].degree for own in widths)
    kept: list[Way] = []
    for degree in sorted({option.degree for own in widths for option in own if option.degree >= least}):
        fastest = [min((o for o in own if o.degree <= degree), key=lambda o: o.latency_ns) for own in widths]
        way = Way(degree=degree, options=tuple(fastest))
        if not kept or way.latency_ns < kept[-1].latency_ns:
            kept.append(way)
    return kept


def waves_of_level(tasks: Tasks, num_devices: int) -> list[DraftWave]:
    """Returns the fastest of the ways to put tasks into one wave, into two, and so on to a wave for each (ours)."""
    candidates = [
        [
            by_marginal_gain({task: tasks[task] for task in wave}, num_devices)
            for wave in _spread(tasks, num_devices, count)
        ]
        for count in range(1, len(tasks) + 1)
    ]
    return min(candidates, key=lambda waves: sum(map(_wave_ns, waves)))


def by_marginal_gain(tasks: Tasks, num_devices: int) -> DraftWave:
    """Splits the devices among tasks whose lowest degrees fit side by side."""
    at = dict.fromkeys(tasks, 0)

    def step(task: tuple[str, ...]) -> tuple[Way, Way]:
        return tasks[task][at[task]], tasks[task][at[task] + 1]

    def gain(task: tuple[str, ...]) -> float:
        now, following = step(task)
        return (now.latency_ns - following.latency_ns) / (following.degree - now.degree)

    while True:
        free = num_devices - sum(ways[at[task]].degree for task, ways in tasks.items())
        growing = [task for task, ways in tasks.items() if at[task] + 1 < len(ways)]
        fitting = [task for task in growing if step(task)[1].degree - step(task)[0].degree <= free]
        if not fitting:
            chosen = {task: ways[at[task]] for task, ways in tasks.items()}
            return tuple(
                Job(
                    parts=tuple(Part(module=name) for name in task),
                    options=way.options,
                )
                for task, way in chosen.items()
            )
        at[max(fitting, key=gain)] += 1


def _spread(tasks: Tasks, num_devices: int, num_waves: int) -> list[list[tuple[str, ...]]]:
    """Puts each task, the longest first, into the wave with least work that has room; makes more where none has."""
    waves: list[list[tuple[str, ...]]] = [[] for _ in range(num_waves)]
    for task in sorted(tasks, key=lambda one: -tasks[one][0].latency_ns):
        needs = tasks[task][0].degree
        room = [wave for wave in waves if sum(tasks[other][0].degree for other in wave) + needs <= num_devices]
        if not room:
            room = [[]]
            waves.append(room[0])
        min(room, key=lambda wave: sum(tasks[o][0].latency_ns * tasks[o][0].degree for o in wave)).append(task)
    return [wave for wave in waves if wave]


def _wave_ns(wave: DraftWave) -> int:
    """The slowest forward plus the slowest backward of a wave of whole tasks."""
    forward = max(sum(option.forward_ns for option in job.options) for job in wave)
    return forward + max(sum(option.backward_ns for option in job.options) for job in wave)
