"""Planners of whole devices: waves of jobs, their devices, and the plan that they become.

A wave runs jobs at the same time on disjoint whole devices and ends when its slowest job does. A wave is a stage.
Where a job runs a chain of modules, its second ones are another stage, and so on. The time predicted is that of
waves, each with its slowest job forward and backward ::

    wave      0                 1
    gpu 0,1   image[0:8/12]     image[8:12/12]      forward: left to right, backward: right to left;
    gpu 2     text[0:9/12]      text[9:12/12]       a wave ends when its slowest job does
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mosaic.errors import UndecidedError
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, SearchRecord, Stage
from mosaic.profile import Phase
from mosaic.solver.held_memory import place_stages
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine, StageResult
from mosaic.solver.task import Answer, Task

Node = TypeVar("Node", bound=Hashable)

Widths = tuple[DeploymentOption, ...]
"""Ways to deploy one module on whole devices, by rising degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts that run in turn on whole devices."""

    parts: tuple[Part, ...]
    """In the order of their forward pass; several where a chain is contracted."""
    options: tuple[DeploymentOption, ...]
    """The deployment of each part's module; those of fewer devices run on some of the job's."""

    @property
    def degree(self) -> int:
        """Devices."""
        return max(option.degree for option in self.options)

    def as_option(self, machine: Machine) -> DeploymentOption:
        """Returns the job as one option: a slice keeps its share and works with as much as its whole module."""
        each = zip(self.parts, self.options, strict=True)
        kept_bytes = sum(-(-option.kept_bytes * part.count // part.total) for part, option in each)
        return DeploymentOption(
            degree=self.degree,
            quota=machine.num_slots,
            forward_ns=0,
            backward_ns=0,
            memory_bytes=kept_bytes + max(option.working_bytes for option in self.options),
            kept_bytes=kept_bytes,
        )


Wave = tuple[Job, ...]
"""Jobs that run at the same time."""
Waves = Sequence[Wave]


def whole_job(name: str, option: DeploymentOption) -> Job:
    """Returns a job that runs one module unsliced."""
    return Job(parts=(Part(module=name),), options=(option,))


def whole_device_widths(options: Sequence[DeploymentOption]) -> Widths:
    """Returns, for each degree, the option that holds most of its devices, by rising degree."""
    widest: dict[int, DeploymentOption] = {}
    for option in options:
        if option.degree not in widest or option.quota > widest[option.degree].quota:
            widest[option.degree] = option
    return tuple(widest[degree] for degree in sorted(widest))


def widths_of(task: Task) -> dict[str, Widths]:
    """Returns the whole-device options of each module."""
    return {name: whole_device_widths(options) for name, options in task.options.items()}


def levels(names: Iterable[Node], predecessors: Callable[[Node], Iterable[Node]]) -> list[list[Node]]:
    """Groups nodes by the longest path that leads to them, so that no level holds a node and one it depends on.

    Spindle's section 3.1 says breadth-first depth, which puts C beside B for A -> B -> C with A -> C.

    Args:
        names: In topological order.
        predecessors: What a node waits for.
    """
    depth: dict[Node, int] = {}
    grouped: list[list[Node]] = []
    for name in names:
        depth[name] = max((depth[other] + 1 for other in predecessors(name)), default=0)
        if depth[name] == len(grouped):
            grouped.append([])
        grouped[depth[name]].append(name)
    return grouped


def plan_waves(task: Task, drafts: Iterable[Waves]) -> Answer:
    """Plans the first of several drafts, the best first, that devices hold over the whole step.

    Jobs share no device, so no interference is in their times. A part's time is its share of the module's time.

    Raises:
        UndecidedError: No devices were found that hold one of the drafts.
    """
    for waves in drafts:
        devices = _find_devices(task, waves)
        if devices is not None:
            return answer_of(task, waves, devices)
    machine = task.machine
    raise UndecidedError(
        f"no devices were found that hold what {task.method} plans, and it is not proven that it has no other plan: "
        f"{machine.num_devices} devices of {machine.memory_bytes:,} bytes have to hold what modules keep across waves, "
        "and it does not choose degrees by memory; use more devices or a smaller batch, or the exact search, which "
        "chooses degrees by memory"
    )


Devices = Mapping[tuple[int, int], tuple[int, ...]]
"""By wave and job."""


def _find_devices(task: Task, waves: Waves) -> Devices | None:
    """Consecutive devices for the jobs of a wave; others where those do not hold what jobs keep."""
    machine = task.machine
    stages = []
    for number, wave in enumerate(waves):
        choices, first = {}, 0
        for index, job in enumerate(wave):
            option = job.as_option(machine)
            choices[f"{number} {index}"] = option, tuple(range(first, first + job.degree))
            first += job.degree
        starts = {name: (0,) * option.degree for name, (option, _) in choices.items()}
        stages.append(StageResult(latency_ns=0, choices=choices, starts=starts))
    placed = place_stages(tuple(stages), machine, is_disturbed=False) if task.is_held else tuple(stages)
    if placed is None:
        return None
    return {
        (number, index): placed[number].choices[f"{number} {index}"][1]
        for number, wave in enumerate(waves)
        for index in range(len(wave))
    }


def answer_of(task: Task, waves: Waves, devices: Devices) -> Answer:
    """Returns waves on the devices of their jobs as a method's answer."""
    placed = [
        [_placements(task, job, devices[number, index]) for index, job in enumerate(wave)]
        for number, wave in enumerate(waves)
    ]
    return Answer(
        stages=tuple(stage for jobs in placed for stage in _stages(jobs)),
        record=SearchRecord(method=task.method),
        predicted_ms=sum(map(_wave_ms, placed)),
    )


def _placements(task: Task, job: Job, devices: tuple[int, ...]) -> list[Placement]:
    placements = []
    for part, option in zip(job.parts, job.options, strict=True):
        forward_ms, backward_ms = (
            part.share * task.cost.placed_ms(part.module, phase, option.degree, option.quota) for phase in Phase
        )
        placements.append(
            Placement(
                part=part,
                slots=tuple(range(option.quota)),
                grid=Grid(ranks=tuple(sorted(devices))[: option.degree]),
                forward_ms=forward_ms,
                backward_ms=backward_ms,
            )
        )
    return placements


def _stages(jobs: Sequence[Sequence[Placement]]) -> Iterator[Stage]:
    """One for the first parts of all jobs, one for the second ones, and so on."""
    for place in range(max(map(len, jobs))):
        yield Stage(placements=tuple(job[place] for job in jobs if place < len(job)))


def _wave_ms(jobs: Sequence[Sequence[Placement]]) -> float:
    forward_ms = max(sum(placement.forward_ms for placement in job) for job in jobs)
    return forward_ms + max(sum(placement.backward_ms for placement in job) for job in jobs)
