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

from mosaic.plan import Grid, Placement, SearchRecord, Stage
from mosaic.profile import Phase
from mosaic.solver.planners.draft import Draw, Job, Sheet, whole_device_widths
from mosaic.solver.planners.placing import place_waves, within_memory
from mosaic.solver.task import Found, Task


def plan_waves(task: Task, draw: Draw) -> Found:
    """Plans with one of the planners that Mosaic is compared with.

    None of them shares a device, so there is no interference in their times. A part's time is its share of the
    module's time at that degree, plus ``slice_overhead_ms`` where it is a slice, in forward and backward each. No
    device is given more than it has over the whole step: jobs get other devices where theirs do not hold them.

    Raises:
        InfeasibleError: Devices do not hold what the planner chose.
        ValueError: A number of layers is given for a module that is not there.
    """
    graph, machine, settings = task.graph, task.machine, task.search.planners
    if unknown := sorted(set(settings.num_layers) - set(graph.names)):
        raise ValueError(f"num_layers names {unknown}; the modules are {', '.join(graph.names)}")
    widths = {module: whole_device_widths(found) for module, found in task.options.items()}
    waves = draw(Sheet(graph=graph, widths=widths, num_devices=machine.num_devices, settings=settings))
    homes = place_waves(waves, graph.predecessors, num_devices=machine.num_devices, island_size=settings.island_size)
    if task.is_held:
        homes = within_memory(task.method, waves, homes, machine)
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
    option, grid = job.option, Grid(ranks=tuple(sorted(devices)))
    placements = []
    for part in job.parts:
        extra_ms = 0.0 if part.is_whole else task.search.planners.slice_overhead_ms
        forward_ms, backward_ms = (
            part.share * task.cost.placed_ms(part.module, phase, option.degree, option.quota) + extra_ms
            for phase in Phase
        )
        placements.append(
            Placement(
                part=part,
                slots=tuple(range(option.quota)),
                grid=grid,
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
