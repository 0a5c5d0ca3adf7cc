"""The tasks of a step: which there are, what they wait for, how long, and what memory they take."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import Plain, chain, images, models, plain, steps, two_encoders, vision_and_text
from pipeline_oracle import natural, simulated

from mosaic.graph import Part
from mosaic.hardware.cluster import Cluster
from mosaic.hardware.find import find_hardware
from mosaic.hardware.link import Link
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import pair_layers, strategies_of
from mosaic.pipelining.task_graph import task_graph, training_chunks
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.tuning import Candidates, pairs_of, with_candidates
from mosaic.pipelining.workload.layers import Feed, PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS


def made(model: PipelineModel, microbatches, name: str = "separated", num_ranks: int = 2, **more) -> TaskGraph:
    sizes = more.pop("sizes", None)
    request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches, sizes=sizes)
    return task_graph(model, partition_by(name, request), microbatches, **more)


def waits_of(graph: TaskGraph) -> dict[int, set[int]]:
    found = defaultdict(set)
    for wait in graph.waits:
        found[wait.target].add(wait.source)
    return found


def test_each_chunk_runs_each_piece_of_each_microbatch_forward_and_backward():
    graph = made(vision_and_text(2, 2), images(3, 0), sizes={"vision": 1})
    counts = Counter((task.microbatch, task.parts[0].module, task.kind) for task in graph.tasks)
    assert counts == {
        (0, "vision", F): 6,
        (0, "vision", B): 6,
        (0, "text", F): 2,
        (0, "text", B): 2,
        (1, "text", F): 2,
        (1, "text", B): 2,
    }
    assert {(task.microbatch, task.parts[0].module): task.group for task in graph.tasks} == {
        (0, "vision"): 0,
        (0, "text"): 1,
        (1, "text"): 2,
    }


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


def test_what_one_task_hands_another_is_one_edge_whatever_modules_it_is_of():
    microbatches = (Microbatch(text_tokens=1, images=2, audio_s=1.0),)
    model = two_encoders()
    first = Partition(
        num_ranks=2,
        chunks=(
            Chunk(
                parts=tuple(Part(module=name, count=n, total=n) for name, n in (("vision", 6), ("audio", 4))), rank=0
            ),
            Chunk(parts=(Part(module="text", count=8, total=8),), rank=1),
        ),
    )
    both = task_graph(model, first, microbatches)
    assert [wait.num_bytes for wait in both.waits if wait.num_bytes] == [3000, 3000]


def test_what_a_skipped_module_feeds_waits_for_what_feeds_it():
    model = PipelineModel(
        modules=(plain("a", 1, counts="all"), plain("b", 1), plain("c", 1, counts="all")),
        feeds=(Feed(source="a", target="b"), Feed(source="b", target="c")),
    )
    graph = made(model, images(0), num_ranks=1)
    assert [(task.parts[0].module, task.kind) for task in graph.tasks] == [("a", F), ("c", F), ("c", B), ("a", B)]
    assert waits_of(graph) == {1: {0}, 2: {1}, 3: {0, 2}}


def test_a_mixed_chunk_runs_what_a_microbatch_has():
    model = vision_and_text(2, 2)
    graph = made(model, images(2, 0), "mixed-time", num_ranks=1)
    assert [[part.module for part in task.parts] for task in graph.tasks] == [["vision", "text"]] * 2 + [["text"]] * 2
    # two layers of two images and two of 4 ms; the very first computes no gradient for inputs
    assert [task.time_ns for task in graph.tasks] == [12_000_000, 22_000_000, 8_000_000, 12_000_000]


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


def test_what_a_forward_keeps_the_last_phase_frees():
    for apart in (False, True):
        graph = made(chain(2), images(1), num_ranks=2, weights_apart=apart, limit_bytes=(5000, 6000))
        balance = defaultdict(int)
        for task in graph.tasks:
            balance[task.chunk] += task.takes_bytes - task.frees_bytes
        assert set(balance.values()) == {0}
        last = {task.chunk: task for task in graph.tasks}
        assert all(task.frees_bytes == 110 for task in last.values())
        assert graph.base_bytes == (8, 8)
        assert graph.limit_bytes == (5000, 6000)


def test_a_lane_is_slowed_by_its_share():
    microbatches = (Microbatch(text_tokens=1, images=2, audio_s=4.0),)
    graph = made(two_encoders(), microbatches, "lanes", num_ranks=2)
    assert graph.rank_of == (0, 0, 1)
    assert [task.time_ns for task in graph.tasks][:2] == [round(12e6 * 56 / 34), round(8e6 * 56 / 22)]


class Knowing(Plain):
    """Three times slower on any share."""

    def on_share(self, share: float) -> Plain:
        return dataclasses.replace(self, unit_ms=tuple(3 * time for time in self.unit_ms))


def test_a_module_that_knows_its_layers_on_a_share_is_asked_for_them():
    microbatches = (Microbatch(text_tokens=1, images=2, audio_s=4.0),)
    vision, audio, text = two_encoders().modules
    knowing = Knowing(name="vision", unit_ms=vision.unit_ms, trains=vision.trains)
    model = PipelineModel(modules=(knowing, audio, text), feeds=two_encoders().feeds)
    graph = made(model, microbatches, "lanes", num_ranks=2)
    assert graph.tasks[0].time_ns == 36_000_000


def test_bytes_take_the_link_between_their_ranks():
    link = Link(gb_per_s=1.0, latency_us=5.0)
    graph = made(chain(2), images(1), network=link)
    assert [wait.lag_ns for wait in graph.waits] == [6000, 0, 0, 6000]  # 5 us and 1000 bytes at 1 byte a ns
    cluster = Cluster(
        hardware=find_hardware("h100-80g"),
        nodes=2,
        gpus_per_node=2,
        intra_node=Link(gb_per_s=100.0),
        inter_node=Link(gb_per_s=1.0),
    )
    inside = made(chain(2), images(1), network=cluster)
    between = made(chain(2), images(1), network=cluster, devices_per_rank=2)
    lags = [max(wait.lag_ns for wait in one.waits) for one in (inside, between)]
    assert lags[1] > lags[0] + 900


def test_steps_and_limits_that_fit_nothing_are_refused():
    model = vision_and_text(2, 2)
    partition = partition_by("separated", Request(model=model, num_ranks=2, microbatches=images(1)))
    with pytest.raises(ValueError, match="no microbatches"):
        task_graph(model, partition, ())
    with pytest.raises(ValueError, match="limit_bytes has 1 ranks"):
        task_graph(model, partition, images(1), limit_bytes=(5,))
    only = PipelineModel(modules=(plain("vision", 2),))
    with pytest.raises(ValueError, match=r"microbatch 1, .* passes through no module"):
        made(only, images(1, 0))


@settings(max_examples=50, deadline=None)
@given(
    models(min_layers=2),
    steps(),
    st.sampled_from(["separated", "mixed-time", "encoders-first", "mixed-parameters"]),
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
    st.sampled_from(["separated", "mixed-time", "lanes"]),
    st.booleans(),
    st.integers(0, 300),
    st.randoms(),
)
def test_tuning_and_the_tasks_of_a_step_count_the_same_times_and_bytes(
    model, microbatches, name: str, apart: bool, workspace: int, chance
):
    model = dataclasses.replace(
        model, modules=tuple(dataclasses.replace(one, workspace=workspace) for one in model.modules)
    )
    try:
        partition = partition_by(name, Request(model=model, num_ranks=2, microbatches=microbatches))
    except ValueError:
        return
    layers = pair_layers(model, partition, microbatches)
    keeps = task_graph(model, partition, microbatches, weights_apart=apart)
    assert layers.keys() == {
        (task.chunk, task.microbatch, task.piece) for task in keeps.tasks if task.kind is ActionKind.BACKWARD
    }
    candidates = Candidates(count=4, weights_apart=apart)
    pairs = pairs_of(keeps, lambda task: candidates.of(layers[task.chunk, task.microbatch, task.piece]))
    choice = [chance.randrange(len(pair.candidates)) for pair in pairs]
    strategies = strategies_of(keeps, pairs, choice)
    chosen = task_graph(model, partition, microbatches, strategies=strategies, weights_apart=apart)
    for tuned, counted in zip(with_candidates(keeps, pairs, choice).tasks, chosen.tasks, strict=True):
        assert (tuned.takes_bytes, tuned.frees_bytes) == (counted.takes_bytes, counted.frees_bytes)
        assert tuned.time_ns == pytest.approx(counted.time_ns, abs=2)
        if tuned.kind is ActionKind.FORWARD:
            key = tuned.chunk, tuned.microbatch, tuned.piece
            own = zip(layers.get(key, ()), strategies.get(key, ()), strict=True)
            assert tuned.takes_bytes - tuned.frees_bytes == sum(one.strategies[way].kept_bytes for one, way in own)
