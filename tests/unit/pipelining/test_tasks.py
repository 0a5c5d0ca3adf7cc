"""The tasks of a step: their waits, times and memory, and what a graph refuses."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import cut_in_pieces, images, models, plain, steps, vision_and_text
from pipeline_oracle import natural, simulated

from mosaic.graph import Part
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.partition import Request
from mosaic.pipelining.task_graph import task_graph, training_chunks
from mosaic.pipelining.tasks import ActionKind, Task, TaskGraph, Wait
from mosaic.pipelining.tuning import pairs_of, strategies_of, with_candidates

PARTS = (Part(module="text"),)


def task(**given) -> Task:
    return Task(**{"row": 0, "kind": ActionKind.FORWARD, "parts": PARTS, "microbatch": 0, "time_ns": 5, **given})


def graph(*tasks: Task, waits: tuple[Wait, ...] = (), **given) -> TaskGraph:
    return TaskGraph(tasks=tasks, waits=waits, **{"rank_of": (0,), **given})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"row": 1}, r"row=1 of task 1 is out of range; use 0 to 0"),
        ({"time_ns": -3}, r"time_ns=-3 of task 1 is negative; use 0 or more"),
        ({"time_ns": 1.5}, r"time_ns of task 1 is 1.5; use a whole number"),
        ({"time_ns": 2**62}, r"add up to more than"),
        ({"frees_bytes": 7}, r"tasks of rank 0 free 7 bytes more than they take"),
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


def made(model: PipelineModel, microbatches, name: str = "separated", num_ranks: int = 2, **more) -> TaskGraph:
    sizes = more.pop("sizes", None)
    request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches)
    partition = partition_by(name, request) if sizes is None else cut_in_pieces(name, request, sizes)
    return task_graph(model, partition, microbatches, **more)


def waits_of(graph: TaskGraph) -> dict[int, set[int]]:
    found = defaultdict(set)
    for wait in graph.waits:
        found[wait.target].add(wait.source)
    return found


def test_pieces_fan_in_before_the_text_and_out_again_in_backward():
    graph = made(vision_and_text(1, 1), images(2), sizes={"vision": 1}, num_ranks=1)
    name = [f"{task.parts[0].module[0]}{task.kind}{task.piece}" for task in graph.tasks]
    found = {name[task]: {name[source] for source in sources} for task, sources in waits_of(graph).items()}
    assert found == {
        "tF0": {"vF0", "vF1"},
        "tB0": {"tF0"},
        "vB0": {"vF0", "tB0"},
        "vB1": {"vF1", "tB0"},
    }
    assert [wait.num_bytes for wait in graph.waits if wait.num_bytes] == [1000] * 4


def test_frozen_modules_have_no_weights_and_no_backward_before_what_trains():
    model = PipelineModel(
        modules=(plain("vision", 2, trains=False), plain("projector", 1), plain("text", 2, trains=False, counts="all")),
        feeds=(Feed(source="vision", target="projector"), Feed(source="projector", target="text")),
    )
    graph = made(model, images(1, 0), num_ranks=1, weights_apart=True)
    kinds = defaultdict(list)
    for task in graph.tasks:
        kinds[task.microbatch, task.parts[0].module].append((str(task.kind), task.time_ns // 1_000_000))
    assert kinds == {
        (0, "vision"): [("F", 2)],
        (0, "projector"): [("F", 1), ("B", 0), ("W", 1)],
        (0, "text"): [("F", 2), ("B", 2)],
        (1, "text"): [("F", 2)],  # nothing before it trains in this microbatch
    }
    vision = next(task for task in graph.tasks if task.parts[0].module == "vision")
    assert vision.takes_bytes == vision.frees_bytes == 10  # its workspace: it keeps nothing for a backward
    request = Request(model=model, num_ranks=1, microbatches=images(1))
    assert training_chunks(model, partition_by("separated", request)) == (1,)


@settings(max_examples=50, deadline=None)
@given(
    models(min_layers=2),
    steps(),
    st.sampled_from(["separated", "mixed-time", "mixed-parameters"]),
    st.booleans(),
)
def test_tasks_wait_for_earlier_ones_and_the_graph_runs_as_it_stands(model, microbatches, name: str, apart: bool):
    graph = made(model, microbatches, name, weights_apart=apart)
    assert all(wait.source < wait.target for wait in graph.waits)
    timed = simulated(graph, natural(graph))
    assert timed is not None
    assert timed.makespan_ns >= max(
        sum(task.time_ns for task in graph.tasks if task.row == row) for row in range(graph.num_rows)
    )
    groups = [task.group for task in graph.tasks]
    assert set(groups) == set(range(max(groups) + 1))  # none is left out
    kinds = defaultdict(list)
    for task in graph.tasks:
        kinds[task.chunk, task.microbatch, task.piece].append(str(task.kind))
    assert {"".join(kind) for kind in kinds.values()} <= ({"F", "FB", "FBW"} if apart else {"F", "FB"})


@settings(max_examples=25, deadline=None)
@given(
    models(min_layers=2),
    steps(3),
    st.sampled_from(["separated", "mixed-time", "colocated"]),
    st.integers(0, 300),
    st.randoms(),
)
def test_tuning_and_the_tasks_of_a_step_count_the_same_times_and_bytes(
    model, microbatches, name: str, workspace: int, chance
):
    model = dataclasses.replace(
        model, modules=tuple(dataclasses.replace(one, workspace=workspace) for one in model.modules)
    )
    try:
        request = Request(model=model, num_ranks=2, microbatches=microbatches, slots_per_rank=4)
        partition = partition_by(name, request)
    except ValueError:
        return
    keeps = task_graph(model, partition, microbatches)
    layers = keeps.layers
    assert layers.keys() == {
        (task.chunk, task.microbatch, task.piece) for task in keeps.tasks if task.kind is ActionKind.BACKWARD
    }
    pairs = pairs_of(keeps)
    choice = [chance.randrange(len(pair.candidates)) for pair in pairs]
    strategies = strategies_of(keeps, pairs, choice)
    chosen = task_graph(model, partition, microbatches, strategies=strategies)
    for tuned, counted in zip(with_candidates(keeps, pairs, choice).tasks, chosen.tasks, strict=True):
        assert (tuned.takes_bytes, tuned.frees_bytes) == (counted.takes_bytes, counted.frees_bytes)
        assert tuned.time_ns == pytest.approx(counted.time_ns, abs=2)
        if tuned.kind is ActionKind.FORWARD:
            key = tuned.chunk, tuned.microbatch, tuned.piece
            own = zip(layers.get(key, ()), strategies.get(key, ()), strict=True)
            assert tuned.takes_bytes - tuned.frees_bytes == sum(one.strategies[way].kept_bytes for one, way in own)
