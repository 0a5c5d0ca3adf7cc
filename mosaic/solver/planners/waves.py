"""Planners of whole devices: waves of jobs, their devices, and their plan.

A wave runs jobs at the same time on disjoint whole devices and ends when its slowest job does; it is a stage ::

    wave      0                 1
    gpu 0,1   image[0:8/12]     image[8:12/12]      forward: left to right, backward: right to left;
    gpu 2     text[0:9/12]      text[9:12/12]       a wave ends when its slowest job does
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mosaic.errors import UndecidedError
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, SearchRecord, TemporalStage
from mosaic.profile import Phase
from mosaic.solver.held_memory import place_stages
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine, StageResult
from mosaic.solver.task import Answer, Task

Widths = tuple[DeploymentOption, ...]
"""Ways to deploy one module on whole devices, by increasing degree."""


@dataclass(frozen=True, slots=True)
class Job:
    """A module, or some of its layers, on whole devices."""

    part: Part
    option: DeploymentOption
    """The deployment of the whole module."""

    def as_option(self, machine: Machine) -> DeploymentOption:
        """Returns the job as one option: a slice holds its share, with the workspace of its whole module."""
        kept_bytes = -(-self.option.kept_bytes * self.part.count // self.part.total)
        return DeploymentOption(
            degree=self.option.degree,
            quota=machine.num_slots,
            forward_ns=0,
            backward_ns=0,
            memory_bytes=kept_bytes + self.option.working_bytes,
            kept_bytes=kept_bytes,
        )


Wave = tuple[Job, ...]
"""Jobs that run at the same time."""
Waves = Sequence[Wave]
Devices = Sequence[Sequence[tuple[int, ...]]]
"""By wave and job."""


def whole_job(name: str, option: DeploymentOption) -> Job:
    """Returns a job that runs one module unsliced."""
    return Job(Part(module=name), option)


def widths_of(task: Task) -> dict[str, Widths]:
    """Returns the whole-device options of each module: for each degree the largest quota."""
    return {
        name: tuple({o.degree: o for o in sorted(options, key=lambda o: (o.degree, o.quota))}.values())
        for name, options in task.options.items()
    }


def plan_waves(task: Task, drafts: Iterable[Waves]) -> Answer:
    """Plans the first of several drafts (best first) that fits into memory over the whole step.

    Jobs do not share devices, so their times have no interference. A slice takes its share of the module's time.

    Raises:
        UndecidedError: No devices were found for any of the drafts.
    """
    for waves in drafts:
        devices = _find_devices(task, waves)
        if devices is not None:
            return answer_of(task, waves, devices)
    machine = task.machine
    raise UndecidedError(
        f"no devices were found for the plan of {task.method}, and it is not proven that none exist: "
        f"{machine.num_devices} devices of {machine.memory_bytes:,} bytes must hold modules' memory across waves, "
        "and it ignores memory in its choice of degrees; use more devices, a smaller batch, or method "
        "'exact'"
    )


def _find_devices(task: Task, waves: Waves) -> Devices | None:
    """Returns consecutive devices for the jobs of a wave, or others if those do not fit into memory."""
    machine = task.machine
    stages = []
    for number, wave in enumerate(waves):
        choices, first = {}, 0
        for index, job in enumerate(wave):
            option = job.as_option(machine)
            choices[f"{number} {index}"] = option, tuple(range(first, first + option.degree))  # slices share a name
            first += option.degree
        stages.append(StageResult(latency_ns=0, choices=choices))
    placed = place_stages(tuple(stages), machine) if task.is_held else tuple(stages)
    return None if placed is None else [stage.devices for stage in placed]


def answer_of(task: Task, waves: Waves, devices: Devices) -> Answer:
    """Returns waves on the devices of their jobs as a method's answer."""

    def placement(job: Job, own: tuple[int, ...]) -> Placement:
        part, option = job.part, job.option
        forward_ms, backward_ms = (
            part.share * task.cost.placed_ms(part.module, phase, option.degree, option.quota) for phase in Phase
        )
        return Placement(
            part=part,
            slots=tuple(range(option.quota)),
            grid=Grid(ranks=tuple(sorted(own))),
            forward_ms=forward_ms,
            backward_ms=backward_ms,
        )

    stages = tuple(
        TemporalStage(placements=tuple(map(placement, wave, own))) for wave, own in zip(waves, devices, strict=True)
    )
    return Answer(stages=stages, record=SearchRecord(method=task.method))
