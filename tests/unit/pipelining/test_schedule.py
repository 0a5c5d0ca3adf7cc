"""Schedules that ranks execute: their text, their files, their lowering from orders, and refused faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from executor_cases import order
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.schedule_checker import check_pipeline_schedule
from pipeline_cases import cut_in_pieces, images, models, steps, vision_and_text
from pipeline_oracle import natural, simulated

from mosaic.artifact import load, save
from mosaic.errors import InvalidScheduleError
from mosaic.hardware import Link
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, lower
from mosaic.pipelining.task_graph import RankSpace, task_graph, training_chunks
from mosaic.pipelining.tasks import ActionKind, Orders, TaskGraph

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def case(**options) -> tuple[Partition, TaskGraph]:
    model = vision_and_text(2, 2)
    request = Request(model=model, num_ranks=2, microbatches=images(2, 1))
    partition = cut_in_pieces("separated", request, {"vision": 1})
    return partition, task_graph(model, partition, images(2, 1), **options)


def lowered(partition: Partition, graph: TaskGraph, orders: Orders | None = None, **options) -> PipelineSchedule:
    return lower(partition, graph, orders or natural(graph), training=range(len(partition.chunks)), **options)


@pytest.mark.parametrize(
    "text",
    ["", "2F", "F0", "2X0", "02F0", "2F0.0", "2F0>3F0", "SEND(2F0)", "FREE(2F0>3F0)", "REDUCE(2F0)", "2F0 ", "SEND"],
)
def test_what_is_no_action_is_refused(text: str):
    with pytest.raises(InvalidScheduleError, match=r"write 2F0\.1"):
        PipelineSchedule(plan="", num_microbatches=1, rank_of=(0,), chunks=("text",), rows=((text,),))


def test_a_small_schedule_is_this_text():
    model = vision_and_text(1, 1)
    partition = partition_by("parallel", Request(model=model, num_ranks=2, microbatches=images(1)))
    graph = task_graph(model, partition, images(1, 0))
    assert lowered(partition, graph).text == (
        "rank 0: 0F0 SEND(0F0>1F0) RECV(1B0>0B0) WAIT_RECV(1B0>0B0) 0B0 FREE(0F0) WAIT_SEND(0F0>1F0) REDUCE(0)\n"
        "rank 1: RECV(0F0>1F0) WAIT_RECV(0F0>1F0) 1F0 1B0 FREE(1F0) SEND(1B0>0B0) 1F1 1B1 FREE(1F1) REDUCE(1) "
        "WAIT_SEND(1B0>0B0)"
    )


def test_text_and_files_give_the_schedule_back(tmp_path: Path):
    partition, graph = case(strategies={(0, 0, 0): (1,)})
    made = lowered(partition, graph, strategies={(0, 0, 0): (1,)})
    assert made.strategies == {"0F0": (1,)}
    assert made.chunks == ("vision[0:1/2]", "vision[1:2/2]", "text[0:1/2]", "text[1:2/2]")
    save(made, tmp_path / "schedule.json")
    assert load(PipelineSchedule, tmp_path / "schedule.json") == made
    changed = (tmp_path / "schedule.json").read_text().replace('"0F0",', '"0F1",', 1)
    (tmp_path / "schedule.json").write_text(changed)
    with pytest.raises(InvalidScheduleError, match="leave the hash out"):
        load(PipelineSchedule, tmp_path / "schedule.json")


@settings(max_examples=40, deadline=None)
@given(models(min_layers=2), steps(3), st.sampled_from(["separated", "mixed-time", "parallel", "colocated"]), st.data())
def test_what_is_lowered_from_any_order_that_runs_is_accepted(model, microbatches, name: str, data: st.DataObject):
    try:
        request = Request(model=model, num_ranks=2, microbatches=microbatches, slots_per_rank=4)
        partition = partition_by(name, request)
    except ValueError:
        return
    link = Link(gb_per_s=0.001) if data.draw(st.booleans()) else None
    graph = task_graph(
        model, partition, microbatches, space=RankSpace(network=link), weights_apart=data.draw(st.booleans())
    )
    orders = order(graph, data.draw(st.randoms(use_true_random=False)))
    training = set(training_chunks(model, partition))
    made = lower(partition, graph, orders, training=training)
    timed = check_pipeline_schedule(made, graph, training=training)
    plain = simulated(graph, orders)
    assert plain is not None
    assert timed.makespan_ns >= plain.makespan_ns
    if link is None:
        assert (list(timed.start_ns), timed.peak_bytes) == (plain.start_ns, plain.peak_bytes)


def mutated(made: PipelineSchedule, change) -> PipelineSchedule:
    rows = [list(row) for row in made.rows]
    change(rows)
    return dataclasses.replace(made, rows=tuple(map(tuple, rows)), hash="")


def moved(rows: list[list[str]], cell: str, to: int) -> None:
    row = next(row for row in rows if cell in row)
    row.remove(cell)
    row.insert(to if to >= 0 else len(row), cell)


def swapped(rows: list[list[str]], one: str, other: str) -> None:
    row = next(row for row in rows if one in row)
    at, place = row.index(one), row.index(other)
    row[at], row[place] = other, one


FAULTS = {
    "a task is missing": (lambda rows: rows[0].remove("0F0"), "0F0 is missing"),
    "a task is in another row": (lambda rows: rows[1].append(rows[0].pop(0)), "belongs into row 0"),
    "backward before forward": (lambda rows: moved(rows, "3B0", 0), "belongs behind 3F0"),
    "a message is not awaited": (lambda rows: rows[1].remove("WAIT_RECV(0F0>1F0)"), r"WAIT_RECV\(0F0>1F0\) is missing"),
    "a task before its message": (lambda rows: moved(rows, "WAIT_RECV(0F0>1F0)", -1), "belongs behind WAIT_RECV"),
    "receives in another order": (
        lambda rows: swapped(rows, "RECV(0F0>1F0)", "RECV(0F0.1>1F0.1)"),
        "post both alike",
    ),
    "freed too early": (lambda rows: moved(rows, "FREE(0F0)", 1), "belongs behind 0B0"),
    "reduced too early": (lambda rows: moved(rows, "REDUCE(0)", 1), "belongs behind 0B"),
    "reduced for nothing": (lambda rows: rows[0].append("REDUCE(9)"), "no such action"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_refused_and_its_cell_named(fault: str):
    partition, graph = case()
    made = lowered(partition, graph)
    check_pipeline_schedule(made, graph, training=range(4))
    change, message = FAULTS[fault]
    with pytest.raises(InvalidScheduleError, match=rf"action \d+ .*{message}"):
        check_pipeline_schedule(mutated(made, change), graph, training=range(4))


def test_rows_that_wait_for_each_other_are_refused():
    partition, graph = case()
    index = {str(TaskName.of(task)): at for at, task in enumerate(graph.tasks)}
    orders = [list(row) for row in natural(graph)]
    orders[0].remove(index["2F1"])
    orders[0].insert(0, index["2F1"])  # before 0F1, on which it waits by way of the other rank
    with pytest.raises(InvalidScheduleError, match="would wait for ever at"):
        lowered(partition, graph, tuple(map(tuple, orders)))
