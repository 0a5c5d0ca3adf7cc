"""Baselines: each runs every task once, without a deadlock, and in its own way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import chain, images, models, plain, steps, vision_and_text
from pipeline_oracle import simulated

from bench.papers.baselines import PAPER_BASELINES
from mosaic.pipelining.baselines import draw_baseline
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.partition import Request
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import ActionKind, Orders, TaskGraph

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def drawn(name: str, model: PipelineModel, microbatches, num_ranks: int = 2) -> tuple[TaskGraph, tuple[Orders, ...]]:
    request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches)
    baseline = PAPER_BASELINES[name]
    _, graph, candidates = draw_baseline(
        baseline,
        request,
        lambda partition: task_graph(model, partition, microbatches, weights_apart=baseline.weights_apart),
    )
    return graph, candidates


def best_ms(graph: TaskGraph, candidates: tuple[Orders, ...]) -> float:
    return min(simulated(graph, orders).makespan_ns for orders in candidates) / 1e6


def row_of(graph: TaskGraph, candidates: tuple[Orders, ...], row: int) -> str:
    tasks = [graph.tasks[index] for index in candidates[0][row]]
    return " ".join(f"{task.chunk}{task.kind}{task.microbatch}.{task.piece}" for task in tasks)


@settings(max_examples=60, deadline=None)
@given(models(min_layers=4), steps(), st.sampled_from(sorted(PAPER_BASELINES)), st.integers(1, 2))
def test_each_baseline_runs_every_task_once_to_the_end(model, microbatches, name: str, num_ranks: int):
    try:
        graph, candidates = drawn(name, model, microbatches, num_ranks)
    except ValueError as error:
        rules = ("a multiple of", "starts with two", "of their own", "the backbone", "and nothing else")
        if not any(rule in str(error) for rule in rules):
            raise
        return
    for orders in candidates:
        assert sorted(index for row in orders for index in row) == list(range(len(graph.tasks)))
        assert simulated(graph, orders) is not None


def test_the_baselines_take_what_they_are_known_for():
    chained = images(*[1] * 8)  # 8 layers on 4 ranks; forward, backward for inputs and for weights 2 units of time each
    times = {
        name: best_ms(*drawn(name, chain(8), chained, 4))
        for name in ("gpipe", "1f1b", "megatron", "zb-h1", "zb-v", "nnscaler*", "dynapipe-order")
    }
    assert times["1f1b"] == times["gpipe"] == times["nnscaler*"] == times["dynapipe-order"]
    assert times["zb-v"] < times["zb-h1"] < times["1f1b"]
    assert times["megatron"] < times["1f1b"]


def test_optimus_runs_all_encoders_first_and_their_backwards_last():
    one = drawn("optimus-coarse", vision_and_text(2, 2), images(1, 1))
    assert row_of(*one, 0) == "0F0.0 0F1.0 2F0.0 2F1.0 2B0.0 2B1.0 0B0.0 0B1.0"
    assert row_of(*one, 1) == "1F0.0 1F1.0 3F0.0 3B0.0 3F1.0 3B1.0 1B0.0 1B1.0"
    decoder = PipelineModel(
        modules=(plain("vision", 4), plain("text", 8, counts="all"), plain("image", 4)),
        feeds=(Feed(source="vision", target="text"), Feed(source="text", target="image")),
    )
    with pytest.raises(ValueError, match="knows no decoders"):
        drawn("optimus-coarse", decoder, images(1))
    stranger = PipelineModel(modules=(plain("a", 4), plain("b", 4, 9.0)))
    with pytest.raises(ValueError, match="'a' does not feed 'b'"):
        drawn("optimus-coarse", stranger, images(1))
