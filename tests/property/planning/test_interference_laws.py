"""Laws of every form of interference: nothing alone, never negative, never less for more neighbours."""

from __future__ import annotations

import itertools
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


@st.composite
def forms(draw: st.DrawFn, shares: list[float]) -> Interference:
    bandwidths = Bandwidths(
        replace(sample(1, 1.0, module=name), bandwidth_utilisation=share)
        for name, share in zip(NAMES, shares, strict=True)
    )
    weight = st.floats(0, 20)
    kind = draw(st.sampled_from(["additive", "full", "pairwise", "assumed"]))
    if kind == "assumed":
        return PairwiseInterference({F: AssumedSharing()}, bandwidths)
    if kind == "pairwise":
        return PairwiseInterference({F: Sharing(pressure=draw(weight), product=draw(weight))}, bandwidths)
    eq8 = Eq8(e1=draw(st.floats(-20, 20)), e2=draw(weight), e3=draw(weight) if kind == "full" else 0.0)
    return Eq8Interference({F: eq8}, bandwidths)


def extra_ms(form: Interference, beside: str) -> float:
    return form.extra_ms("a", F, quota=1, alone_ms=3.0, beside=[(name, 1) for name in beside])


@given(st.data(), SHARES)
@BOUNDED
def test_more_neighbours_never_cost_less_and_each_form_is_what_it_says(
    data: st.DataObject, shares: list[float]
) -> None:
    form = data.draw(forms(shares))
    order = "".join(data.draw(st.permutations(NAMES[1:])))
    costs = [extra_ms(form, order[:count]) for count in range(len(order) + 1)]
    assert costs[0] == 0
    for fewer, more in itertools.pairwise(costs):
        assert more >= fewer * ROUNDING >= 0
    if isinstance(form, PairShares):
        in_turn = sum(extra_ms(form, name) for name in NAMES[1:])
        assert abs(costs[-1] - in_turn) <= 1e-9 * max(1.0, in_turn)
    if form.is_zero:
        assert costs[-1] == 0


@given(st.data(), SHARES, st.integers(1, 7), st.floats(0, 1))
@BOUNDED
def test_a_neighbour_that_draws_more_never_costs_less(
    data: st.DataObject, shares: list[float], which: int, more: float
) -> None:
    greedier = [*shares[:which], max(more, shares[which]), *shares[which + 1 :]]
    seed = data.draw(st.integers(0, 2**31))
    before, after = (_seeded(drawn, seed) for drawn in (shares, greedier))
    assert extra_ms(after, NAMES[1:]) >= extra_ms(before, NAMES[1:]) * ROUNDING


def _seeded(shares: list[float], seed: int) -> Interference:
    weights = [(seed >> shift) % 8 / 2 for shift in (0, 3, 6)]
    bandwidths = Bandwidths(
        replace(sample(1, 1.0, module=name), bandwidth_utilisation=share)
        for name, share in zip(NAMES, shares, strict=True)
    )
    if seed % 2:
        return Eq8Interference({F: Eq8(e1=weights[0] - 2, e2=weights[1], e3=weights[2])}, bandwidths)
    return PairwiseInterference({F: Sharing(pressure=weights[0], product=weights[1])}, bandwidths)
