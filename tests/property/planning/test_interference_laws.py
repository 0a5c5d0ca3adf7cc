"""Laws of every form of interference: nothing alone, never negative, never less for more neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import sample

from mosaic.cost import (
    Bandwidths,
    Eq8,
    Eq8Interference,
    Interference,
    PairwiseInterference,
    Sharing,
)
from mosaic.cost.interference import AssumedSharing, PairShares
from mosaic.profile import Phase

BOUNDED = settings(max_examples=80, deadline=None, derandomize=True)
F = Phase.FORWARD
NAMES = "abcdefgh"
SHARES = st.lists(st.floats(0, 1), min_size=len(NAMES), max_size=len(NAMES))
ROUNDING = 1 - 1e-9


KINDS = st.sampled_from(["additive", "full", "pairwise", "assumed"])
WEIGHTS = st.tuples(st.floats(-20, 20), st.floats(0, 20), st.floats(0, 20))


def form_of(kind: str, weights: tuple[float, float, float], shares: list[float]) -> Interference:
    bandwidths = Bandwidths(
        replace(sample(1, 1.0, module=name), bandwidth_utilisation=share)
        for name, share in zip(NAMES, shares, strict=True)
    )
    constant, first, second = weights
    if kind == "assumed":
        return PairwiseInterference({F: AssumedSharing()}, bandwidths)
    if kind == "pairwise":
        return PairwiseInterference({F: Sharing(pressure=first, product=second)}, bandwidths)
    return Eq8Interference({F: Eq8(e1=constant, e2=first, e3=second if kind == "full" else 0.0)}, bandwidths)


def extra_ms(form: Interference, beside: Iterable[str]) -> float:
    return form.extra_ms("a", F, quota=1, alone_ms=3.0, beside=[(name, 1) for name in beside])


@given(KINDS, WEIGHTS, SHARES, st.permutations(NAMES[1:]))
@BOUNDED
def test_more_neighbours_never_cost_less_and_each_form_is_what_it_says(kind, weights, shares, order) -> None:
    form = form_of(kind, weights, shares)
    costs = [extra_ms(form, order[:count]) for count in range(len(order) + 1)]
    assert costs[0] == 0
    for fewer, more in itertools.pairwise(costs):
        assert more >= fewer * ROUNDING >= 0
    if isinstance(form, PairShares):
        in_turn = sum(extra_ms(form, name) for name in NAMES[1:])
        assert abs(costs[-1] - in_turn) <= 1e-9 * max(1.0, in_turn)
    if form.is_zero:
        assert costs[-1] == 0


@given(KINDS, WEIGHTS, SHARES, st.integers(1, 7), st.floats(0, 1))
@BOUNDED
def test_a_neighbour_that_draws_more_never_costs_less(kind, weights, shares, which, more) -> None:
    greedier = [*shares[:which], max(more, shares[which]), *shares[which + 1 :]]
    before, after = (extra_ms(form_of(kind, weights, drawn), NAMES[1:]) for drawn in (shares, greedier))
    assert after >= before * ROUNDING
