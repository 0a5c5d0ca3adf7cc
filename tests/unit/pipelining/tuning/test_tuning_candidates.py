"""Candidates of a chunk against all combinations of its layers' strategies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.pipelining.tuning.candidates import Candidate, Candidates
from mosaic.pipelining.workload.layers import Layer, Strategy


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


def added(candidate: Candidate) -> int:
    return candidate.forward_ns + candidate.backward_ns


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
def test_candidates_are_the_fastest_the_leanest_and_the_fastest_of_each_bucket(chunk: list[Layer], count: int) -> None:
    found = Candidates(count=count).of(chunk)
    sums = all_sums(chunk)
    front = sorted(s for s in set(sums) if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in sums))
    assert len(found) <= count
    assert [(one.kept_bytes, added(one)) for one in found] == sorted(
        ((one.kept_bytes, added(one)) for one in found), reverse=True
    )
    assert (found[0].kept_bytes, added(found[0])) == front[-1]
    assert (found[-1].kept_bytes, added(found[-1])) == front[0]
    assert {(one.kept_bytes, added(one)) for one in found} <= set(front)
    if len(front) <= count:
        assert len(found) == len(front)


@given(st.lists(layers(), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_candidate_is_what_its_strategies_add_up_to_and_works_in_no_more_than_everything(chunk: list[Layer]) -> None:
    for one in Candidates(count=5).of(chunk):
        ways = [own.strategies[index] for own, index in zip(chunk, one.strategies, strict=True)]
        assert one.kept_bytes == sum(way.kept_bytes for way in ways)
        assert one.forward_ns == round(1e6 * math.fsum(way.extra_forward_ms for way in ways))
        last = max(chunk[-1].strategies[0].kept_bytes, ways[-1].kept_bytes)
        everything = sum(own.strategies[0].kept_bytes for own in chunk) + max(own.workspace_bytes for own in chunk)
        assert one.kept_bytes - ways[-1].kept_bytes + last <= one.kept_bytes + one.workspace_bytes <= everything


def test_of_layers_that_are_alike_the_last_ones_keep_theirs() -> None:
    half = next(c for c in Candidates(count=9).of([layer((0, 0, 100), (0, 1, 10))] * 8) if sum(c.strategies) == 4)
    assert half.strategies == (1, 1, 1, 1, 0, 0, 0, 0)
    assert half.workspace_bytes == 0


def test_where_backward_for_weights_is_apart_what_is_made_anew_is_in_use_until_it_ran() -> None:
    chunk = [layer((0, 0, 100), (0, 1, 10), workspace=7)] * 4
    together, apart = Candidates(count=5).of(chunk), Candidates(count=5, weights_apart=True).of(chunk)
    assert [one.kept_bytes + one.workspace_bytes for one in apart] == [407] * 5
    assert together[-1].kept_bytes + together[-1].workspace_bytes == 137


def test_a_chunk_of_many_unlike_layers_has_candidates_that_still_reach_from_fastest_to_leanest() -> None:
    chunk = [layer((0, 0, 1000 + 37 * at), (0, 1 + at / 7, 300 + 11 * at), (0, 3 + at / 3, 5 + at)) for at in range(24)]
    found = Candidates(count=16).of(chunk)
    assert len(found) > 12
    assert found[0].strategies == (0,) * 24
    assert found[-1].strategies == (2,) * 24


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ([layer((0, math.nan, 1))], "adds nan ms; use a finite time"),
        ([layer((-1.0, 0, 1))], "adds -1.0 ms"),
        ([layer((0, 0, -1))], "layer 0 has negative times or bytes"),
        ([layer()], "layer 0 has no strategy"),
    ],
)
def test_what_no_layer_can_be_is_refused(chunk: list[Layer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Candidates().of(chunk)


def test_fewer_than_two_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="count=1"):
        Candidates(count=1)
