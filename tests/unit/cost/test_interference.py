"""Interference: Eq. 8 and the pairwise form over bandwidths, and measured pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import pair, sample

from mosaic.cost import Bandwidths, Eq8, Eq8Interference, MeasuredInterference, PairwiseInterference, Sharing
from mosaic.profile import Phase

F, B = Phase.FORWARD, Phase.BACKWARD


def bandwidths(**shares: float) -> Bandwidths:
    """The same share at quotas 1 to 8, in the forward phase."""
    return Bandwidths(
        replace(sample(q, 1.0, module=m), bandwidth_utilisation=share) for m, share in shares.items() for q in (1, 8)
    )


def test_eq8_as_written_is_the_paper_s_and_not_zero_for_a_module_alone() -> None:
    eq8 = Eq8(e1=-1.0, e2=4.0, e3=10.0)
    assert eq8.as_written_ms([0.5, 0.4]) == pytest.approx(-1 + 4 * 0.9 + 10 * 0.2)
    assert eq8.as_written_ms([0.5]) == pytest.approx(-1 + 4 * 0.5 + 10 * 0.5)
    assert eq8.as_written_ms([0.1]) == pytest.approx(0.4)


def test_the_form_is_eq8_beside_one_neighbour_and_zero_alone() -> None:
    form = Eq8Interference({F: Eq8(e1=-1.0, e2=4.0, e3=10.0)}, bandwidths(a=0.5, b=0.4))
    assert form.extra_ms("a", F, quota=1, alone_ms=7.0, beside=[("b", 2)]) == pytest.approx(4.6)
    assert form.extra_ms("a", F, quota=1, alone_ms=70.0, beside=[("b", 2)]) == pytest.approx(4.6)
    assert form.extra_ms("a", F, quota=1, alone_ms=7.0, beside=[]) == 0
    assert form.extra_ms("a", B, quota=1, alone_ms=7.0, beside=[("b", 2)]) == 0
    assert not form.is_zero


def test_the_pairwise_form_takes_shares_of_the_time_alone() -> None:
    form = PairwiseInterference({F: Sharing(pressure=0.1, product=0.5)}, bandwidths(a=0.5, b=0.4))
    assert form.extra_ms("a", F, quota=1, alone_ms=10.0, beside=[("b", 1)]) == pytest.approx(10 * (0.04 + 0.1))


def test_a_measured_pair_loses_its_share_in_its_phase_and_an_unmeasured_one_the_median() -> None:
    pairs = [pair("a", "b", 1.2, phase=F), pair("b", "a", 1.4, phase=F), pair("a", "b", 1.1, phase=B)]
    measured = MeasuredInterference(pairs)

    def extra_ms(module: str, phase: Phase, beside: str) -> float:
        return measured.extra_ms(module, phase, quota=1, alone_ms=4.0, beside=[(beside, 1)])

    assert [extra_ms("a", F, "b"), extra_ms("a", B, "b")] == pytest.approx([0.8, 0.4])
    assert extra_ms("b", F, "c") == pytest.approx(4 * 0.3)
