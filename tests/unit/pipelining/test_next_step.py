"""Planning ahead: which schedule is taken when, and the ways in which planning fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from next_step_cases import plan

from mosaic.pipelining.next_step import NextStepPlanner, Planned

PATIENCE_S = 60.0
"""On a busy machine; nothing waits so long."""


@pytest.fixture(scope="module")
def shared() -> Iterator[NextStepPlanner]:
    with NextStepPlanner(plan) as planner:
        yield planner


class Steps:
    number = 0

    def __init__(self, planner: NextStepPlanner) -> None:
        self.planner = planner

    def start(self, step_s: float | None = None, **metadata: Any) -> None:
        Steps.number += 1
        self.planner.start(Steps.number, metadata, step_s=step_s)

    def take(self, wait_s: float = PATIENCE_S) -> Planned:
        return self.planner.take(Steps.number, wait_s=wait_s)


@pytest.fixture
def steps(shared: NextStepPlanner) -> Steps:
    """Steps of one planner for many tests: the numbers go on."""
    return Steps(shared)


def test_a_schedule_is_planned_elsewhere_and_taken(steps: Steps) -> None:
    for value in (3, 4):
        steps.start(do="double", value=value)
        assert steps.take() == Planned(schedule=2 * value)


def test_a_search_ends_with_the_steps_time_when_it_is_taken_and_when_another_step_starts(steps: Steps) -> None:
    steps.start(step_s=0.01, do="search")
    assert steps.take().schedule == "over"
    steps.start(step_s=1000.0, do="search")
    assert steps.take(wait_s=0).schedule == "stopped"
    steps.start(step_s=1000.0, do="search")
    steps.start(do="double", value=1)
    assert steps.take().schedule == 2


@pytest.mark.parametrize(("what", "said"), [("exit", "enough"), ("unreadable", "no such class here")])
def test_an_error_is_reported_and_the_next_step_is_planned(steps: Steps, what: str, said: str) -> None:
    steps.start(do=what)
    planned = steps.take()
    assert planned.schedule is None
    assert said in planned.error
    steps.start(do="double", value=6)
    assert steps.take().schedule == 12


def test_a_process_that_dies_is_reported() -> None:
    with NextStepPlanner(plan) as planner:
        for step in range(2):
            planner.start(step, {"do": "die"})
            assert "exit code 7" in planner.take(step, wait_s=PATIENCE_S).error


def test_the_process_has_no_torch_and_half_of_the_cores(shared: NextStepPlanner, steps: Steps) -> None:
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    steps.start(do="environment")
    assert steps.take().schedule == {"torch": False, "cores": half, "threads": half, "pid": shared.pid}
    assert shared.pid != os.getpid()


def test_the_process_dies_with_its_parent() -> None:
    script = """
import os, signal
from next_step_cases import plan
from mosaic.pipelining.next_step import NextStepPlanner
planner = NextStepPlanner(plan)
planner.start(0, {"do": "hang"})
print(planner.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        said, _ = parent.communicate(timeout=PATIENCE_S)  # the output ends when the planning process ends, too
    assert int(said.split()[0]) > 0
