"""Megatron-LM: one module after the other at one data-parallel degree (Mosaic section 2.2, Fig. 3a).

The best degree is chosen, as if tuned by hand. A module without that degree gets the next lower one. ``plan_on_all`` is
data-parallel training without a plan.
"""

from __future__ import annotations

from mosaic.solver.planners.waves import Waves, plan_waves, whole_job, widths_of
from mosaic.solver.task import Answer, Task


def plan(task: Task) -> Answer:
    """Plans the fastest degree that fits into memory."""
    degrees = sorted({option.degree for options in task.options.values() for option in options}, reverse=True)
    drafts = [_at(task, degree) for degree in degrees]
    return plan_waves(task, sorted(drafts, key=lambda waves: sum(job.option.latency_ns for (job,) in waves)))


def plan_on_all(task: Task) -> Answer:
    """Plans every module at its largest degree."""
    return plan_waves(task, [_at(task, task.machine.num_devices)])


def _at(task: Task, degree: int) -> Waves:
    options = {
        name: max((option for option in own if option.degree <= degree), key=lambda o: o.degree, default=own[0])
        for name, own in widths_of(task).items()
    }
    return [(whole_job(name, options[name]),) for name in task.graph.topological_order()]
