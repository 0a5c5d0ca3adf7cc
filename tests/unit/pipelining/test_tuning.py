"""Layer tuning: candidates of chunks, one rank's choice against the optimum, and simulated steps within memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_oracle import simulated
from tuning_cases import one_f_one_b

from mosaic.pipelining.layers import Layer, Strategy
from mosaic.pipelining.tasks import Orders, TaskGraph, Timed, memory_peaks
from mosaic.pipelining.tuning import (
    MemoryShortage,
    Pair,
    Tuned,
    candidates_of,
    tune,
    with_candidates,
)

RAGGED = (1.0, 0.4, 1.6, 0.7, 1.3, 0.4, 1.0, 1.6)


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


def makespan(graph: TaskGraph, pairs: list[Pair], orders: Orders, choice: list[int]) -> int:
    return simulated(with_candidates(graph, pairs, choice), orders).makespan_ns


@given(
    st.integers(1, 4),
    st.lists(st.sampled_from([0.4, 0.7, 1.0, 1.6]), min_size=1, max_size=7),
    st.floats(0.0, 1.1),
    st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_what_is_chosen_fits_and_ends_no_earlier_than_the_bound_and_no_later_than_the_leanest(
    num_ranks: int, sizes: list[float], share: float, seed: int
) -> None:
    graph, pairs, orders = one_f_one_b(num_ranks, sizes, limit_share=share, seed=seed)
    tuned = tune(graph, pairs, orders)
    leanest = with_candidates(graph, pairs, [pair.leanest for pair in pairs])
    at_leanest = simulated(leanest, orders)
    fits = all(used <= limit for used, limit in zip(peaks(leanest, at_leanest), graph.limit_bytes, strict=True))
    assert isinstance(tuned, Tuned if fits else MemoryShortage)
    if isinstance(tuned, Tuned):
        again = simulated(with_candidates(graph, pairs, tuned.choice), orders)
        assert again.makespan_ns == tuned.timed.makespan_ns
        assert all(used <= limit for used, limit in zip(peaks(tuned.graph, again), graph.limit_bytes, strict=True))
        assert tuned.bound_ns <= again.makespan_ns <= at_leanest.makespan_ns
        assert tuned.bound_ns == makespan(graph, pairs, orders, [pair.fastest for pair in pairs])


def test_memory_that_nothing_fits_names_rank_time_amount_and_help() -> None:
    graph, pairs, orders = one_f_one_b(3, RAGGED, limit_share=1.0)
    limits = (graph.limit_bytes[0], 300_000_000, graph.limit_bytes[2])
    short = tune(replace(graph, limit_bytes=limits), pairs, orders)
    assert isinstance(short, MemoryShortage)
    assert short.rank == 1
    said = str(short)
    assert "rank 1 is short of" in said
    assert "0.3 GB" in said
    assert "ms into the step" in said
    assert "smaller microbatches, or more ranks" in said
    enough = replace(graph, limit_bytes=(limits[0], limits[1] + short.short_bytes, limits[2]))
    assert isinstance(tune(enough, pairs, orders), Tuned)
