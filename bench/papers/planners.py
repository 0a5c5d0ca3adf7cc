"""Planners and an estimator that only the Spindle paper compares with (arXiv 2409.03365, section 5.1 and appendix H).

* ``distmm-mt``: DistMM for each task by itself, one task after the other;
* ``spindle-seq``: tasks in turn, every module on all devices;
* ``spindle-optimus``, after Optimus (EuroSys 2018): each task starts with the fewest devices that it can have, and the
  next increment goes to the largest marginal gain (T(n) - T(n')) / (n' - n). A task runs its modules in turn on its
  devices, each at its best degree there. *Ours*: tasks are spread over as many waves as is fastest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mosaic.graph import ModuleGraph, Part
from mosaic.plan import SearchRecord
from mosaic.solver.methods import Method
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners import distmm, megatron
from mosaic.solver.planners.waves import Job, Wave, levels, plan_waves, widths_of
from mosaic.solver.task import Answer, Task

TaskNames = tuple[str, ...]
"""Modules of one task, producers first."""


def task_planners(tasks: Sequence[TaskNames]) -> tuple[Method, ...]:
    """Returns the planners of a model with these tasks."""

    def method(name: str, plan: Callable[[Task], Answer], description: str) -> Method:
        return Method(name=name, description=description, plan=plan)

    return (
        method("distmm-mt", lambda task: _task_by_task(task, tasks, distmm.plan), "distmm for each task by itself"),
        method("spindle-seq", lambda task: _task_by_task(task, tasks, megatron.plan_on_all), "tasks in turn"),
        method("spindle-optimus", lambda task: _optimus(task, tasks), "devices to the largest marginal gain"),
    )


def _task_by_task(task: Task, tasks: Sequence[TaskNames], plan: Callable[[Task], Answer]) -> Answer:
    answers = [plan(_part_of(task, names)) for names in tasks]
    return Answer(
        stages=tuple(stage for answer in answers for stage in answer.stages),
        record=SearchRecord(method=task.method),
        predicted_ms=sum(answer.predicted_ms or 0.0 for answer in answers),
    )


def _part_of(task: Task, names: TaskNames) -> Task:
    graph = ModuleGraph(
        modules=tuple(module for module in task.graph.modules if module.name in names),
        edges=tuple(edge for edge in task.graph.edges if edge.source in names and edge.target in names),
    )
    return replace(task, graph=graph, options={name: task.options[name] for name in graph.names})


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


Ways = Mapping[TaskNames, Sequence[Way]]
"""Ways to run each task, by rising degree and falling time."""


def _optimus(task: Task, tasks: Sequence[TaskNames]) -> Answer:
    order = task.graph.topological_order()
    in_order = {name: tuple(other for other in order if other in own) for own in tasks for name in own}

    def waits_for(own: TaskNames) -> list[TaskNames]:  # tasks of several modules wait for no other one
        return [in_order[o] for name in own for o in task.graph.predecessors(name) if in_order[o] != own]

    ways = {own: list(_ways(task, own)) for own in dict.fromkeys(in_order[name] for name in order)}
    num_devices = task.machine.num_devices
    waves = [
        wave
        for level in levels(ways, waits_for)
        for wave in waves_of_level({own: ways[own] for own in level}, num_devices)
    ]
    return plan_waves(task, [waves])


def _ways(task: Task, names: TaskNames) -> Iterator[Way]:
    """Of each number of devices the best, without those that are no faster than fewer."""
    widths = [widths_of(task)[name] for name in names]
    least = max(own[0].degree for own in widths)
    best_ns: int | None = None
    for degree in sorted({option.degree for own in widths for option in own if option.degree >= least}):
        fastest = [min((o for o in own if o.degree <= degree), key=lambda o: o.latency_ns) for own in widths]
        way = Way(degree=degree, options=tuple(fastest))
        if best_ns is None or way.latency_ns < best_ns:
            best_ns = way.latency_ns
            yield way


def waves_of_level(tasks: Ways, num_devices: int) -> list[Wave]:
    """Returns the fastest of the ways to put tasks into one wave, into two, and so on to a wave for each."""
    candidates = [
        [
            by_marginal_gain({own: tasks[own] for own in wave}, num_devices)
            for wave in _spread(tasks, num_devices, count)
        ]
        for count in range(1, len(tasks) + 1)
    ]
    return min(candidates, key=lambda waves: sum(map(_wave_ns, waves)))


def by_marginal_gain(tasks: Ways, num_devices: int) -> Wave:
    """Splits the devices among tasks whose lowest degrees fit side by side."""
    at = dict.fromkeys(tasks, 0)

    def step(own: TaskNames) -> tuple[Way, Way]:
        return tasks[own][at[own]], tasks[own][at[own] + 1]

    def gain(own: TaskNames) -> float:
        now, following = step(own)
        return (now.latency_ns - following.latency_ns) / (following.degree - now.degree)

    while True:
        free = num_devices - sum(ways[at[own]].degree for own, ways in tasks.items())
        growing = [own for own, ways in tasks.items() if at[own] + 1 < len(ways)]
        fitting = [own for own in growing if step(own)[1].degree - step(own)[0].degree <= free]
        if not fitting:
            return tuple(
                Job(parts=tuple(Part(module=name) for name in own), options=ways[at[own]].options)
                for own, ways in tasks.items()
            )
        at[max(fitting, key=gain)] += 1


def _spread(tasks: Ways, num_devices: int, num_waves: int) -> list[list[TaskNames]]:
    """Puts each task, the longest first, into the wave with least work that has room; adds waves where none has."""
    waves: list[list[TaskNames]] = [[] for _ in range(num_waves)]
    for own in sorted(tasks, key=lambda one: -tasks[one][0].latency_ns):
        needs = tasks[own][0].degree
        room = [wave for wave in waves if sum(tasks[other][0].degree for other in wave) + needs <= num_devices]
        if not room:
            room = [[]]
            waves.append(room[0])
        min(room, key=lambda wave: sum(tasks[o][0].latency_ns * tasks[o][0].degree for o in wave)).append(own)
    return [wave for wave in waves if wave]


def _wave_ns(wave: Wave) -> int:
    forward = max(sum(option.forward_ns for option in job.options) for job in wave)
    return forward + max(sum(option.backward_ns for option in job.options) for job in wave)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseAlphaBeta:
    """Spindle's estimator (section 3.2, appendix A): T(n) = alpha + beta / n between two profiled degrees."""

    degrees: tuple[int, ...]
    """Profiled numbers of devices, rising."""
    times: tuple[float, ...]
    """Time at each of them."""

    def time(self, degree: int) -> float:
        """Returns the time at a degree between the first and the last."""
        at = bisect_right(self.degrees, degree) - 1
        if self.degrees[at] == degree:
            return self.times[at]
        low, high = self.degrees[at], self.degrees[at + 1]
        shrinks = (self.times[at] - self.times[at + 1]) / (1 / low - 1 / high)
        return self.times[at] + shrinks * (1 / degree - 1 / low)


def profiled_degrees(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the degrees that Spindle profiles: the first, the last, and powers of two."""
    return tuple(n for n in degrees if n in (degrees[0], degrees[-1]) or n & (n - 1) == 0)
