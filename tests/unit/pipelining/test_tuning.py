"""Layer tuning: candidates of chunks, one rank's choice against the optimum, and simulated steps within memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import chain, images, models, steps
from pipeline_oracle import natural, simulated

from bench.papers.data_sets import Microbatch
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Layer, PipelineModel, Strategy
from mosaic.pipelining.partition import Request
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import Orders, TaskGraph, Timed, memory_peaks
from mosaic.pipelining.tuning import MemoryShortage, Tuned, candidates_of, pairs_of, tune, with_candidates


def layer(*ways: tuple[float, float, int], workspace: int = 0) -> Layer:
    return Layer(
        forward_ms=1.0,
        backward_ms=1.0,
        weights_ms=1.0,
        strategies=tuple(
            Strategy(name="keep" if not at else "recompute", kept_bytes=k, extra_forward_ms=f, extra_backward_ms=b)
            for at, (f, b, k) in enumerate(ways)
        ),
        workspace_bytes=workspace,
    )


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    ways = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 50))
    return layer((0, 0, 60), *draw(st.lists(ways, max_size=3)), workspace=draw(st.integers(0, 9)))


def all_sums(chunk: Sequence[Layer]) -> list[tuple[int, int]]:
    """(kept bytes, nanoseconds added) of every combination."""
    return [
        (
            sum(way.kept_bytes for way in ways),
            round(1e6 * math.fsum(way.extra_forward_ms + way.extra_backward_ms for way in ways)),
        )
        for ways in itertools.product(*(one.strategies for one in chunk))
    ]


@given(st.lists(layers(), min_size=1, max_size=5), st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_candidates_are_the_fastest_the_leanest_and_some_between_that_none_beats(
    chunk: list[Layer], count: int
) -> None:
    found = candidates_of(chunk, count)
    sums = all_sums(chunk)
    front = sorted(s for s in set(sums) if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in sums))
    assert len(found) <= count
    assert [(one.kept_bytes, one.added_ns) for one in found] == sorted(
        ((one.kept_bytes, one.added_ns) for one in found), reverse=True
    )
    assert (found[0].kept_bytes, found[0].added_ns) == front[-1]
    assert (found[-1].kept_bytes, found[-1].added_ns) == front[0]
    assert {(one.kept_bytes, one.added_ns) for one in found} <= set(front)


def peaks(graph: TaskGraph, timed: Timed) -> list[int]:
    return [peak for peak, _ in memory_peaks(graph, timed.start_ns)]


def in_turn(model: PipelineModel, microbatches: Sequence[Microbatch], num_ranks: int) -> tuple[TaskGraph, Orders]:
    """A step with everything kept, without a limit of memory, and an order that runs."""
    request = Request(model=model, num_ranks=num_ranks, microbatches=microbatches)
    graph = task_graph(model, partition_by("mixed-time", request), microbatches)
    return graph, natural(graph)


@given(models(min_layers=4), steps(), st.integers(1, 4), st.floats(0.0, 1.1))
@settings(max_examples=25, deadline=None)
def test_what_is_chosen_fits_and_ends_no_earlier_than_the_bound_and_no_later_than_the_leanest(
    model: PipelineModel, microbatches: Sequence[Microbatch], num_ranks: int, share: float
) -> None:
    free, orders = in_turn(model, microbatches, num_ranks)
    pairs = pairs_of(free)
    leanest = with_candidates(free, pairs, [pair.leanest for pair in pairs])
    at_leanest = simulated(leanest, orders)
    least, most = peaks(leanest, at_leanest), peaks(free, simulated(free, orders))
    limits = (round(low * 0.9 + share * (high - low * 0.9)) for low, high in zip(least, most, strict=True))
    graph = replace(free, limit_bytes=tuple(limits))
    tuned = tune(graph, pairs, orders)
    fits = all(used <= limit for used, limit in zip(least, graph.limit_bytes, strict=True))
    assert isinstance(tuned, Tuned if fits else MemoryShortage)
    if isinstance(tuned, Tuned):
        again = simulated(with_candidates(graph, pairs, tuned.choice), orders)
        assert again.makespan_ns == tuned.timed.makespan_ns
        assert all(used <= limit for used, limit in zip(peaks(tuned.graph, again), graph.limit_bytes, strict=True))
        assert tuned.bound_ns <= again.makespan_ns <= at_leanest.makespan_ns
        fastest = with_candidates(graph, pairs, [pair.fastest for pair in pairs])
        assert tuned.bound_ns == simulated(fastest, orders).makespan_ns


def test_memory_that_nothing_fits_names_rank_time_amount_and_help() -> None:
    free, orders = in_turn(chain(6), images(*[1] * 8), 3)
    pairs, most = pairs_of(free), peaks(free, simulated(free, orders))
    graph = replace(free, limit_bytes=(most[0], 50, most[2]))
    short = tune(graph, pairs, orders)
    assert isinstance(short, MemoryShortage)
    assert short.rank == 1
    assert f"rank 1 is short of {short.short_bytes / 1e9:.3g} GB of its 5e-08 GB" in str(short)
    enough = replace(graph, limit_bytes=(most[0], 50 + short.short_bytes, most[2]))
    assert isinstance(tune(enough, pairs, orders), Tuned)
