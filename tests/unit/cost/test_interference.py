"""Interference: measured pairs, and shares assumed from bandwidths."""

from __future__ import annotations

import pytest
from planning_cases import pair

from mosaic.cost import BandwidthInterference, MeasuredInterference
from mosaic.profile import Phase

F, B = Phase.FORWARD, Phase.BACKWARD


def test_assumed_shares_of_the_time_alone_add_up_over_neighbours() -> None:
    form = BandwidthInterference(lambda module, phase, quota: {"a": 0.25, "b": 0.4, "c": 0.2}[module])
    assert form.extra_ms("a", F, quota=1, alone_ms=10.0, beside=[("b", 1), ("c", 2)]) == pytest.approx(10 * 0.5 * 0.6)
    assert form.extra_ms("a", F, quota=1, alone_ms=10.0, beside=[]) == 0


def test_a_measured_pair_loses_its_share_in_its_phase_and_an_unmeasured_one_the_median() -> None:
    pairs = [pair("a", "b", 1.2, phase=F), pair("b", "a", 1.4, phase=F), pair("a", "b", 1.1, phase=B)]
    measured = MeasuredInterference([*pairs, pair("c", "a", 0.9, phase=B)])

    def extra_ms(module: str, phase: Phase, beside: str) -> float:
        return measured.extra_ms(module, phase, quota=1, alone_ms=4.0, beside=[(beside, 1)])

    assert [extra_ms("a", F, "b"), extra_ms("a", B, "b")] == pytest.approx([0.8, 0.4])
    assert extra_ms("b", F, "c") == pytest.approx(4 * 0.3)
    assert extra_ms("c", B, "a") == 0  # faster than alone is noise
