"""Planning ahead: the schedule of each step, and the ways in which planning fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from next_step_cases import plan
from oracles.schedule_checker import check_pipeline_schedule
from pipeline_cases import images, vision_and_text

from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.next_step import NextStepPlanner
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Request
from mosaic.pipelining.plan import PipelinePlan, StepPlanner
from mosaic.pipelining.planner import PlannerOptions, share_out
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.task_graph import RankSpace, task_graph
from mosaic.pipelining.tasks import roll_out

PATIENCE_S = 60.0
"""On a busy machine; nothing waits so long."""


class Steps:
    def __init__(self, planner: NextStepPlanner) -> None:
        self.planner, self.number = planner, 0

    def start(self, step_s: float | None = None, **metadata: Any) -> None:
        self.number += 1
        self.planner.start(self.number, metadata, step_s=step_s)

    def take(self, wait_s: float = PATIENCE_S) -> tuple[Any, str]:
        return self.planner.take(self.number, wait_s=wait_s)


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    """Steps of one planner for many tests: the numbers go on."""
    with closing(NextStepPlanner(plan)) as planner:
        yield Steps(planner)


def test_a_search_ends_with_the_steps_time_when_it_is_taken_and_when_another_step_starts(steps: Steps) -> None:
    steps.start(step_s=0.01, do="search")
    assert steps.take()[0] == "over"
    steps.start(step_s=1000.0, do="search")
    assert steps.take(wait_s=0)[0] == "stopped"
    steps.start(step_s=1000.0, do="search")
    steps.start(do="double", value=1)
    assert steps.take()[0] == 2


@pytest.mark.parametrize(("what", "said"), [("exit", "enough"), ("unreadable", "no such class here")])
def test_an_error_is_reported_and_the_next_step_is_planned(steps: Steps, what: str, said: str) -> None:
    steps.start(do=what)
    schedule, error = steps.take()
    assert schedule is None
    assert said in error
    steps.start(do="double", value=6)
    assert steps.take()[0] == 12


def test_a_process_that_dies_is_reported() -> None:
    with closing(NextStepPlanner(plan)) as planner:
        for step in range(2):
            planner.start(step, {"do": "die"})
            assert "exit code 7" in planner.take(step, wait_s=PATIENCE_S)[1]


def test_the_process_dies_with_its_parent() -> None:
    script = """
import os, signal
from next_step_cases import plan
from mosaic.pipelining.next_step import NextStepPlanner
planner = NextStepPlanner(plan)
planner.start(0, {"do": "hang"})
print("started", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        said, _ = parent.communicate(timeout=PATIENCE_S)  # the output ends when the planning process ends, too
    assert said.split() == [b"started"]


@given(times=st.lists(st.floats(0.0, 10.0), max_size=12), num_replicas=st.integers(1, 5))
def test_each_microbatch_is_in_one_share_and_no_share_is_far_above_the_others(times: list[float], num_replicas: int):
    shares = share_out(times, num_replicas)
    assert sorted(at for share in shares for at in share) == list(range(len(times)))
    assert all(list(share) == sorted(share) for share in shares)
    loads = [sum(times[at] for at in share) for share in shares]
    assert max(loads) - min(loads) <= max(times, default=0.0) + 1e-9
    assert bool(shares[0]) == bool(times)
    assert max(map(len, shares)) <= 1 or len(times) > num_replicas or 0.0 in times


def planner_of(request: Request, **degrees: int) -> StepPlanner:
    plan = PipelinePlan(
        name="planned", degrees=Degrees(pipeline=2, **degrees), partition=partition_by("separated", request)
    )
    return StepPlanner(plan=plan, request=request, space=RankSpace(), options=PlannerOptions())


def test_each_replica_with_microbatches_has_a_schedule_of_its_share():
    request = Request(model=vision_and_text(2, 2), num_ranks=2, microbatches=images(1, 2))
    shared = planner_of(request, data=3)(images(2, 1), OrderLimits(seconds=0.2))
    assert shared.shares == ((0,), (1,), ())
    assert [schedule and schedule.num_microbatches for schedule in shared.schedules] == [1, 1, None]


def test_each_step_is_planned_ahead_for_its_own_microbatches():
    request = Request(model=vision_and_text(2, 2), num_ranks=2, microbatches=images(1, 2))
    step_planner = planner_of(request)
    with closing(NextStepPlanner(step_planner)) as planner:
        for number, step in enumerate((images(3, 1), images(0, 2, 1))):
            planner.start(number, step, step_s=0.5)
            shared, error = planner.take(number, wait_s=60.0)
            assert not error
            (schedule,) = shared.schedules
            graph = task_graph(request.model, step_planner.plan.partition, step)
            natural = roll_out(graph)
            assert isinstance(natural, tuple)
            assert check_pipeline_schedule(schedule, graph).makespan_ns <= 1.001 * natural[1].makespan_ns
