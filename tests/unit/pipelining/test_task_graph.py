"""Task graphs: what they refuse, and that they stay what they are on the way to another process."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from task_graph_cases import FORWARD, random_step

from mosaic.graph import Part
from mosaic.pipelining.tasks import Task, TaskGraph, Wait, roll_out

PARTS = (Part(module="text"),)


def task(**given) -> Task:
    return Task(**{"row": 0, "kind": FORWARD, "parts": PARTS, "microbatch": 0, "time_ns": 5, **given})


def graph(*tasks: Task, waits: tuple[Wait, ...] = (), **given) -> TaskGraph:
    return TaskGraph(tasks=tasks, waits=waits, **{"rank_of": (0,), **given})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"row": 1}, r"row=1 of task 1 is out of range; use 0 to 0"),
        ({"time_ns": -3}, r"time_ns=-3 of task 1 is negative; use 0 or more"),
        ({"time_ns": float("nan")}, r"time_ns of task 1 is nan; use a whole number"),
        ({"time_ns": 1.5}, r"time_ns of task 1 is 1.5; use a whole number"),
        ({"time_ns": 2**64}, r"use a whole number of at most 63 bits"),
        ({"time_ns": 2**62}, r"add up to more than"),
        ({"takes_bytes": -1}, r"takes_bytes=-1 of task 1"),
        ({"frees_bytes": 7}, r"tasks of rank 0 free 7 bytes more than they take"),
        ({"microbatch": -1}, r"microbatch=-1 of task 1"),
        ({"group": 9}, r"group=9 of task 1 is out of range; use 0 to 1"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_by_value_rule_and_way_out(bad: dict, message: str):
    with pytest.raises(ValueError, match=message):
        graph(task(), task(**bad))


def test_tasks_that_wait_in_a_circle_are_refused_with_the_circle():
    waits = tuple(Wait(source=a, target=b) for a, b in ((0, 1), (1, 2), (2, 1)))
    with pytest.raises(ValueError, match=r"in a circle: (1 -> 2 -> 1|2 -> 1 -> 2); leave out"):
        graph(task(), task(), task(), waits=waits)


def test_a_wait_for_a_task_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="source=4 of wait 0 is out of range"):
        graph(task(), waits=(Wait(source=4, target=0),))


def test_a_graph_survives_pickling_copying_and_replacing():
    step = random_step(3, ranks=2, microbatches=2, room=0.6)
    made = pickle.loads(pickle.dumps(step))
    assert made == step
    assert roll_out(made) == roll_out(step) == roll_out(copy.deepcopy(step))
    assert dataclasses.replace(step, limit_bytes=()).limit_bytes == ()
