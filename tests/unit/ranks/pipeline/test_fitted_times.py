"""Counted times, fitted to what a step took."""

from __future__ import annotations

import pytest
from pipeline_cases import images, two_encoders

from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannerOptions, plan_step
from mosaic.pipelining.schedule.action import TaskName
from mosaic.ranks.pipeline.fitting import MeasuredTasks, fit_times
from mosaic.schedule import ActionKind


def test_scales_and_what_a_cut_forward_takes_more_are_found_again():
    request = Request(model=two_encoders(), num_ranks=2, microbatches=images(2, 3))
    planned = plan_step(request, images(2, 3), options=PlannerOptions(partition="separated", weights="with"))
    right = {"vision": (2.0, 3.0), "audio": (1.0, 0.5), "text": (4.0, 5.0)}
    taken, whole_ns = {}, 0
    for task in planned.graph.tasks:
        forward, backward = right[task.parts[0].module]
        is_forward = task.kind is ActionKind.FORWARD
        own = round(task.time_ns * (forward if is_forward else backward))
        taken[str(TaskName.of(task))] = own + (7_000 if is_forward else 0)
        whole_ns += own * is_forward
    measured = MeasuredTasks(start_ns=dict.fromkeys(taken, 0), time_ns=taken)
    present = {task.parts[0].module for task in planned.graph.tasks}
    fitted = fit_times(planned, measured, sorted(present), whole_forwards_ns=whole_ns)
    assert fitted.task_ns == 7_000
    for name in present:
        assert fitted.scales[name] == pytest.approx(right[name], rel=1e-3)
