"""The gate, case by case: who is promoted, who is refused, and what the sentence says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from mosaic.errors import MosaicError
from mosaic.retrain.gate import (
    Comparison,
    Contest,
    DayScores,
    GateResult,
    GateSettings,
    ModelFacts,
    Scores,
    compare,
    decide,
    margin_finding,
    paired,
)

NUM_ROWS = 2000
SETTINGS = GateSettings(resamples=1000)
CONTEST = Contest(facts=ModelFacts(export_difference=0.0), challenger="0042", champion="0041", anchor="0012")
KITCHEN = ["kitchen"] * NUM_ROWS


def right(*, wrong: int = 100, first: int = 0, rows: int = NUM_ROWS) -> np.ndarray:
    """Values of a model that is wrong on ``wrong`` rows from the ``first`` on."""
    values = np.ones(rows)
    values[first : first + wrong] = 0
    return values


def judged(
    *frozen: np.ndarray,
    fresh: Sequence[np.ndarray] = (),
    contest: Contest = CONTEST,
    settings: GateSettings = SETTINGS,
    **columns: Sequence[str],
) -> GateResult:
    """Judges by values of the challenger, the champion and the anchor."""
    versions = ("0042", "0041", "0012")
    scores = [Scores.of(n, "frozen", {"value": v, **columns}) for n, v in zip(versions, frozen, strict=False)]
    scores += [Scores.of(n, "fresh", {"value": v}) for n, v in zip(versions, fresh, strict=False)]
    return decide(DayScores(scores=tuple(scores)), contest, settings)


def of(result: GateResult, name: str, against: str = "0041") -> Comparison:
    return next(each for each in result.comparisons if (each.name, each.against) == (name, against))


def test_a_tie_is_promoted_where_the_rows_can_tell_and_refused_where_they_cannot():
    result = judged(right(), right(), right())
    assert result.passes
    assert -0.01 < of(result, "frozen").low < of(result, "frozen").difference == 0 < of(result, "frozen").high < 0.01
    assert "0042 is as good as 0041 within 0.01" in result.reason
    few = judged(*[right(wrong=5, rows=100)] * 3)
    assert not few.passes
    assert "0042 cannot be shown to be as good as 0041 on the frozen rows" in few.reason
    group = judged(right(), right(), right(), cluster=KITCHEN)
    assert not group.passes
    assert of(group, "frozen").num_clusters == 1
    assert math.isfinite(of(group, "frozen").low)


def test_a_better_challenger_and_the_first_one_are_promoted():
    better = judged(right(wrong=50), right(wrong=100), right(wrong=100))
    assert better.reason.startswith("0042 is better than 0041: +0.0250, at least +0.0")
    first = judged(right(), contest=replace(CONTEST, champion=None, anchor=None))
    assert (better.passes, first.passes, first.comparisons) == (True, True, ())
    assert first.reason == "There was no champion yet, and 0042 passes every check."


def test_the_anchor_stops_losses_that_are_small_every_day():
    result = judged(right(wrong=150), right(wrong=148), right(wrong=100))
    assert of(result, "frozen").passed
    assert not of(result, "anchor", "0012").passed
    assert "0012 (the anchor)" in result.reason


def test_rows_on_which_the_champion_has_no_value_are_left_out_and_named():
    broken = right()
    broken[500:520] = math.nan
    result = judged(right(), broken, right())
    assert result.passes
    assert of(result, "frozen").num_rows == NUM_ROWS - 20
    assert any("0041 has no finite value on 20 of 2,000" in finding.sentence for finding in result.findings)
    refused = judged(broken, right(), right())
    assert "0042 has no finite value on 20 of 2,000 frozen rows" in refused.reason


def test_a_slice_that_is_worse_is_named_and_does_not_decide():
    settings = replace(SETTINGS, slices=("site",))
    sites = ["north"] * 1500 + ["south"] * 400 + ["west"] * 100
    new = right(wrong=50) * right(wrong=40, first=1500)
    result = judged(new, right(wrong=150), right(wrong=150), settings=settings, site=sites)
    assert result.passes
    assert [(each.name, each.counts, each.passed) for each in result.comparisons[2:]] == [
        ("site=north", False, True),
        ("site=south", False, False),
        ("site=west", False, True),
    ]
    assert result.todo == "It is worse on site=south: look at these rows, or go back."
    with pytest.raises(MosaicError, match=r"\[gate\] slices names 'site', and score returns room"):
        judged(new, new, new, settings=settings, room=sites)


def test_fresh_rows_refuse_a_loss_and_alone_never_promote():
    fresh = [right(wrong=0, rows=500), right(wrong=400, rows=500)]
    better = judged(right(wrong=200), right(wrong=100), right(wrong=100), fresh=fresh)
    assert of(better, "fresh").low > 0.7
    assert not better.passes
    worse = judged(right(), right(), right(), fresh=[right(wrong=150, rows=500), right(wrong=50, rows=500)])
    assert not worse.passes
    assert "on the day's fresh rows" in worse.reason
    few = judged(right(), right(), right(), fresh=[right(wrong=5, rows=100), right(wrong=3, rows=100)])
    assert (of(few, "fresh").counts, of(few, "fresh").passed) == (False, True)  # they are too few to be called worse


def test_a_challenger_that_is_not_valid_is_refused_before_it_is_compared():
    facts = ModelFacts(invalid_tensors=("head.weight", "head.bias"), export_difference=0.5)
    result = judged(right(), right(), right(), contest=replace(CONTEST, facts=facts))
    failed = [finding.name for finding in result.findings if not finding.passed]
    assert failed == ["finite", "export"]
    assert result.reason.startswith("head.weight and 1 more has values that are not finite")
    assert result.reason.endswith("1 more did not pass.")
    assert result.comparisons == ()


def test_a_margin_that_the_frozen_rows_cannot_resolve_is_refused_with_the_way_out():
    assert margin_finding(Scores.of("0041", "frozen", {"value": right()}), SETTINGS).passed
    few = margin_finding(Scores.of("0041", "frozen", {"value": right(wrong=5, rows=100)}), SETTINGS)
    assert not few.passed
    assert "bring more rows" in few.sentence
    assert not margin_finding(Scores.of("0041", "frozen", {"value": right(), "cluster": KITCHEN}), SETTINGS).passed


def test_the_interval_is_that_of_scipys_bootstrap_where_rows_are_many():
    draw = np.random.default_rng(0)
    old = (draw.random(1500) < 0.9).astype(float)
    new = np.where(draw.random(1500) < 0.1, 1 - old, old)
    pair = paired(*(Scores.of(name, "frozen", {"value": values}) for name, values in (("2", new), ("1", old))))
    result = compare("frozen", pair, 0.0, replace(SETTINGS, resamples=4000))
    theirs = stats.bootstrap((new - old,), np.mean, n_resamples=4000, confidence_level=0.9, method="BCa", rng=1)
    assert result.low == pytest.approx(theirs.confidence_interval.low, abs=0.15 * theirs.standard_error)
    assert result.high == pytest.approx(theirs.confidence_interval.high, abs=0.15 * theirs.standard_error)
