"""Planning ahead: what is handed over when, and what happens when planning goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from next_step_cases import plan

from mosaic.pipelining.next_step.planner import BUDGET_SHARE, HandedOver, NextStepPlanner

PATIENCE_S = 60.0
"""On a machine that is busy; nothing waits so long."""
Kind = Literal["process", "thread"]
KINDS: tuple[Kind, ...] = ("process", "thread")


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[NextStepPlanner]:
    with NextStepPlanner(plan, kind=request.param) as planner:
        yield planner


@pytest.fixture
def steps(shared: NextStepPlanner) -> Steps:
    """Steps of one planner for many tests: the numbers go on."""
    return Steps(shared)


class Steps:
    number = 0

    def __init__(self, planner: NextStepPlanner) -> None:
        self.planner = planner

    def start(self, step_s: float | None = None, **metadata: Any) -> int:
        Steps.number += 1
        self.planner.start(Steps.number, metadata, step_s=step_s)
        return Steps.number

    def take(self, wait_s: float = PATIENCE_S) -> HandedOver:
        return self.planner.take(Steps.number, wait_s=wait_s)


def test_a_schedule_is_planned_elsewhere_and_handed_over(steps: Steps) -> None:
    for value in (3, 4):
        step = steps.start(do="double", value=value)
        handed = steps.take()
        assert (handed.schedule, handed.step, handed.is_final, handed.error) == (2 * value, step, True, "")


def test_the_best_so_far_is_handed_over_while_the_search_goes_on_and_the_search_is_then_ended(steps: Steps) -> None:
    step = steps.start(do="offer", values=["good"])
    handed = steps.take()  # comes back although the function waits to be told to stop
    assert (handed.schedule, handed.step, handed.is_final) == ("good", step, False)
    steps.start(do="double", value=1)  # it was told to
    assert steps.take().schedule == 2


def test_a_step_for_which_nothing_was_found_gets_the_last_one_known(steps: Steps) -> None:
    known = steps.start(do="double", value=21)
    assert steps.take().schedule == 42
    steps.start(do="until over")
    handed = steps.take(wait_s=0)
    assert (handed.schedule, handed.step, handed.is_final) == (42, known, False)


def test_an_error_is_reported_and_the_next_step_is_planned(steps: Steps) -> None:
    known = steps.start(do="double", value=5)
    steps.take()
    for what, said in (("exit", "enough"), ("unreadable", "no such class here")):
        steps.start(do=what)
        handed = steps.take()
        assert (handed.schedule, handed.step, handed.is_final) == (10, known, False)
        assert said in handed.error
    steps.start(do="double", value=6)
    assert steps.take().schedule == 12


def test_what_was_offered_before_an_error_is_handed_over_with_the_error(steps: Steps) -> None:
    step = steps.start(do="fail", offer="good enough")
    handed = steps.take()
    while not handed.error:
        handed = steps.take(wait_s=0)
    assert (handed.schedule, handed.step, handed.is_final) == ("good enough", step, False)
    assert "RuntimeError: no such link" in handed.error
    assert "next_step_cases.py" in handed.error


def test_a_search_has_a_share_of_the_steps_own_time_and_ends_with_it(steps: Steps) -> None:
    steps.start(step_s=100.0, do="seconds")
    (left,) = steps.take().schedule
    assert 0 < left <= 100 * BUDGET_SHARE
    steps.start(do="seconds")
    assert steps.take().schedule == [None]
    steps.start(step_s=0.01, do="until over")
    handed = steps.take()
    assert (handed.schedule, handed.is_final) == ("over", True)


def test_a_new_step_ends_the_one_before(steps: Steps) -> None:
    steps.start(do="until over")
    steps.start(do="double", value=8)
    assert steps.take().schedule == 16


def test_a_process_has_no_torch_and_half_of_the_cores() -> None:
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    with NextStepPlanner(plan) as planner:
        planner.start(0, {"do": "environment"})
        found = planner.take(0, wait_s=PATIENCE_S).schedule
        assert found == {"torch": False, "cores": half, "threads": half, "pid": planner.pid}
        assert found["pid"] != os.getpid()


def test_a_process_that_dies_is_reported_and_replaced_but_not_for_ever() -> None:
    with NextStepPlanner(plan) as planner:
        planner.start(0, {"do": "double", "value": 1})
        assert planner.take(0, wait_s=PATIENCE_S).schedule == 2
        for step, what in ((1, "die"), (2, "double"), (3, "die"), (4, "die"), (5, "die")):
            planner.start(step, {"do": what, "value": 2})
            handed = planner.take(step, wait_s=PATIENCE_S)
            if what == "die":
                assert "exit code 7" in handed.error
                assert handed.step in (0, 2)
            else:
                assert (handed.schedule, handed.error) == (4, "")
        planner.start(6, {"do": "double", "value": 2})
        assert "3 times in a row" in planner.take(6, wait_s=PATIENCE_S).error


def test_a_process_that_does_not_stop_is_replaced() -> None:
    with NextStepPlanner(plan, grace_s=0.05) as planner:
        planner.start(0, {"do": "hang"})
        assert planner.take(0, wait_s=PATIENCE_S).schedule == "hanging"
        stuck = planner.pid
        planner.start(1, {"do": "double", "value": 4})
        assert planner.take(1, wait_s=PATIENCE_S).schedule == 8
        assert planner.pid != stuck


def test_a_thread_that_does_not_stop_leaves_the_last_schedule_known() -> None:
    with NextStepPlanner(plan, kind="thread", grace_s=0.05) as planner:
        planner.start(0, {"do": "hang"})
        assert planner.take(0, wait_s=PATIENCE_S).schedule == "hanging"
        planner.start(1, {"do": "double", "value": 4})
        handed = planner.take(1, wait_s=PATIENCE_S)
        assert (handed.schedule, handed.step) == ("hanging", 0)
        assert "should_stop" in handed.error


def test_closing_ends_the_process_and_all_threads_even_if_it_hangs() -> None:
    before = set(threading.enumerate())
    planner = NextStepPlanner(plan, grace_s=0.05)
    planner.start(0, {"do": "hang"})
    planner.take(0, wait_s=PATIENCE_S)
    pid = planner.pid
    assert pid is not None
    planner.close()
    planner.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ValueError, match="closed"):
        planner.start(1, {})


@pytest.mark.parametrize("started_by", ["main", "another"])
def test_a_process_dies_with_its_parent_however_that_ends(started_by: str) -> None:
    script = f"""
import os, signal, threading
from next_step_cases import plan
from mosaic.pipelining.next_step.planner import NextStepPlanner
def begin():
    global planner
    planner = NextStepPlanner(plan)
    planner.start(0, {{"do": "hang"}})
    assert planner.take(0, wait_s={PATIENCE_S}).schedule == "hanging"
if {started_by!r} == "main":
    begin()
else:
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()  # the kernel would end the worker with this thread, were it asked to
    planner.start(1, {{"do": "hang"}})
    assert planner.take(1, wait_s={PATIENCE_S}).step is not None
print(planner.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        # Its output ends when the last one ends that holds it, which the worker does.
        said, _ = parent.communicate(timeout=PATIENCE_S)
    assert int(said) > 0


def not_here(metadata: Any, search: Any) -> None: ...


def test_a_function_that_a_worker_cannot_find_is_refused_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be pickled"):
        NextStepPlanner(lambda metadata, search: None)
    with monkeypatch.context() as patched:
        patched.setattr(not_here, "__module__", "__main__")
        patched.setattr(sys.modules["__main__"], "not_here", not_here, raising=False)
        with pytest.raises(ValueError, match="of the main script"):
            NextStepPlanner(not_here)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "gone_module", sys.modules[__name__])
        patched.setattr(not_here, "__module__", "gone_module")
        with NextStepPlanner(not_here) as planner:
            planner.start(0, {})
            handed = planner.take(0, wait_s=PATIENCE_S)
    assert handed.schedule is None
    assert "No module named 'gone_module'" in handed.error


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads=1000; use 1 to"):
        NextStepPlanner(plan, num_threads=1000)
    with NextStepPlanner(plan, kind="thread") as planner:
        with pytest.raises(ValueError, match="step 3 is taken"):
            planner.take(3)
        planner.start(0, {"do": "double", "value": 0})
        with pytest.raises(ValueError, match="step 3 is taken"):
            planner.take(3)
        with pytest.raises(ValueError, match="step_s=nan"):
            planner.start(1, {}, step_s=float("nan"))
