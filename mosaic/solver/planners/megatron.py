"""Megatron-LM: every module in turn, all at one data-parallel degree (Mosaic section 2.2, Fig. 3a).

Any degree that the cost model offers may be the one, not only all devices: the best is taken, as a person does who
tunes it. A module that cannot have that degree has the next lower one. ``plan_on_all`` is data-parallel training as it
is without a plan.
"""

from __future__ import annotations

from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.waves import Waves, Widths, plan_waves, whole_job, widths_of
from mosaic.solver.task import Answer, Task


def plan(task: Task) -> Answer:
    """Plans the fastest degree that devices hold."""
    degrees = sorted({option.degree for options in task.options.values() for option in options}, reverse=True)
    return plan_waves(task, sorted((_at(task, degree) for degree in degrees), key=_total_ns))


def plan_on_all(task: Task) -> Answer:
    """Plans every module at the largest degree that it can have."""
    return plan_waves(task, [_at(task, task.machine.num_devices)])


def _at(task: Task, degree: int) -> Waves:
    widths = widths_of(task)
    return [(whole_job(name, _nearest(widths[name], degree)),) for name in task.graph.topological_order()]


def _nearest(widths: Widths, degree: int) -> DeploymentOption:
    return max((option for option in widths if option.degree <= degree), key=lambda o: o.degree, default=widths[0])


def _total_ns(waves: Waves) -> int:
    return sum(job.option.latency_ns for wave in waves for job in wave)
