"""From the waves that a planner draws to stages of a plan: devices, memory, times.

A wave is a stage. Where a job runs a chain of modules, its second ones are another stage, and so on; nothing waits
for a stage's end when it runs, so what runs when is the same. The time predicted is that of waves, each with its
slowest job forward and backward: of stages with barriers it would be more where a chain runs beside something else::

    wave      0                 1
    gpu 0,1   image[0:8/12]     image[8:12/12]      forward: left to right, backward: right to left;
    gpu 2     text[0:9/12]      text[9:12/12]       a wave ends when its slowest job does
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.plan import Grid, Placement, SearchRecord, Stage
from mosaic.profile import Phase
from mosaic.solver.planners.draft import DraftWave, Draw, Job, Sheet, whole_device_widths
from mosaic.solver.planners.placing import Homes, find_homes, is_proven_homeless
from mosaic.solver.task import Found, Task


def plan_waves(task: Task, draw: Draw, *, draws_all: bool = False) -> Found:
    """Plans with one of the planners that Mosaic is compared with: the first of its drafts that devices hold.

    None of them shares a device, so there is no interference in their times. A part's time is its share of the
    module's time at that degree, plus ``slice_overhead_ms`` where it is a slice, in forward and backward each. No
    device is given more than it has over the whole step: jobs get other devices where theirs do not hold them.

    Args:
        task: What to plan.
        draw: The planner.
        draws_all: Whether its drafts are all plans that it could ever make. Only then can it be proven that it has
            none.

    Raises:
        InfeasibleError: Devices hold nothing that the planner could choose, which is proven.
        UndecidedError: No devices were found that hold what it drew.
        ValueError: Its settings name other modules than there are.
    """
    sheet = sheet_of(task)
    is_proven = draws_all
    for waves in draw(sheet):
        homes = find_homes(waves, sheet, is_held=task.is_held)
        if homes is not None:
            return as_found(task, waves, homes)
        is_proven = is_proven and is_proven_homeless(waves, sheet.machine)
    raise _refusal(task, is_proven=is_proven)


def sheet_of(task: Task) -> Sheet:
    """Returns a task as planners of whole devices see it."""
    settings = task.search.planners
    settings.check_names(task.graph)
    return Sheet(
        graph=task.graph,
        widths={module: whole_device_widths(found) for module, found in task.options.items()},
        cost=task.cost,
        machine=task.machine,
        settings=settings,
        limits=task.search.limits,
        is_judged=task.method not in ("auto", "exact"),
    )


def as_found(task: Task, waves: Sequence[DraftWave], homes: Homes) -> Found:
    """Returns waves on the devices of their jobs as a method's answer."""
    placed = [
        [_placements(job, devices, task) for job, devices in zip(wave, own, strict=True)]
        for wave, own in zip(waves, homes, strict=True)
    ]
    return Found(
        stages=tuple(stage for jobs in placed for stage in _stages(jobs)),
        record=SearchRecord(method=task.method),
        predicted_ms=sum(map(_wave_ms, placed)),
    )


def _placements(job: Job, devices: tuple[int, ...], task: Task) -> list[Placement]:
    """One for each part of a job, in turn."""
    placements = []
    for part, option in zip(job.parts, job.options, strict=True):
        extra_ms = 0.0 if part.is_whole else task.search.planners.slice_overhead_ms
        forward_ms, backward_ms = (
            part.share * task.cost.placed_ms(part.module, phase, option.degree, option.quota) + extra_ms
            for phase in Phase
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


def _refusal(task: Task, *, is_proven: bool) -> InfeasibleError | UndecidedError:
    room = f"{task.machine.num_devices} devices of {task.machine.memory_bytes:,} bytes"
    way_out = "use more devices or a smaller batch, or the exact search, which chooses degrees by memory"
    if is_proven:
        return InfeasibleError(
            f"nothing that {task.method} can plan fits into the devices' memory",
            reasons=[f"{room} do not hold what modules keep across waves at any of its degrees: {way_out}"],
        )
    return UndecidedError(
        f"no devices were found that hold what {task.method} plans, and it is not proven that it has no other plan: "
        f"{room} have to hold what modules keep across waves, and it does not choose degrees by memory; {way_out}"
    )
