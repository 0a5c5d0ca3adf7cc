"""How sure a difference is, and what a set of rows can tell before a challenger is there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from mosaic.retrain.gate import GateSettings, Scores, bootstrap, resolution, resolution_finding
from mosaic.retrain.gate.bootstrap import alikeness, normal_of_student, resample, student_of_normal
from mosaic.retrain.gate.compare import holm
from mosaic.retrain.gate.scores import Pair


def pair(old: np.ndarray, new: np.ndarray, cluster: np.ndarray | None = None) -> Pair:
    groups = np.arange(len(old)) if cluster is None else cluster
    return Pair(challenger="2", against="1", old=old, new=new, cluster=groups, columns={})


def flipped(num_rows: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    old = (draw.random(num_rows) < 0.9).astype(float)
    return old, np.where(draw.random(num_rows) < share, 1 - old, old)


@pytest.mark.parametrize("degrees", [4, 9, 30, 500])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.999])
def test_students_quantiles_are_those_of_scipy(degrees: int, level: float):
    normal = stats.norm.ppf(level)
    assert student_of_normal(normal, degrees) == pytest.approx(stats.t.ppf(level, degrees), rel=0.04)
    assert normal_of_student(student_of_normal(normal, degrees), degrees) == pytest.approx(normal)
    assert student_of_normal(-normal, degrees) == -student_of_normal(normal, degrees)


@pytest.mark.parametrize("degrees", [1, 2, 3])
def test_students_quantiles_are_too_wide_where_degrees_are_few(degrees: int):
    assert student_of_normal(1.645, degrees) > stats.t.ppf(0.95, degrees)


def test_no_degrees_of_freedom_tell_nothing():
    assert student_of_normal(1.645, 0) == math.inf
    assert student_of_normal(-1.645, 0.001) == -math.inf
    assert normal_of_student(3.0, 0) == 0


def test_bounds_are_those_of_scipys_bootstrap_where_rows_are_many():
    old, new = flipped(1500, 0.1)
    found = resample(pair(old, new), 4000, 0)
    theirs = stats.bootstrap((new - old,), np.mean, n_resamples=4000, confidence_level=0.9, method="BCa", rng=1)
    assert found.low(0.95) == pytest.approx(theirs.confidence_interval.low, abs=0.15 * theirs.standard_error)
    assert found.high(0.95) == pytest.approx(theirs.confidence_interval.high, abs=0.15 * theirs.standard_error)
    assert found.standard_error == pytest.approx(theirs.standard_error, rel=0.05)


def test_rows_of_a_group_are_drawn_together():
    old, new = flipped(200, 0.1)
    copies = pair(np.repeat(old, 10), np.repeat(new, 10), np.repeat(np.arange(200), 10))
    alone, together = resample(pair(old, new), 2000, 0), resample(copies, 2000, 0)
    assert together.num_clusters == 200
    assert together.difference == alone.difference
    assert together.standard_error == pytest.approx(alone.standard_error, rel=0.1)


def test_memory_is_bounded_and_the_turns_do_not_repeat(monkeypatch: pytest.MonkeyPatch):
    old, new = flipped(500, 0.1)
    whole = resample(pair(old, new), 2000, 0)
    monkeypatch.setattr(bootstrap, "MAX_WEIGHTS", 100_000)
    parts = resample(pair(old, new), 2000, 0)
    assert len(set(parts.lows)) > 50
    assert parts.standard_error == pytest.approx(whole.standard_error, rel=0.1)


def test_the_same_seed_gives_the_same_bounds():
    one, same, other = (resample(pair(*flipped(300, 0.1)), 1000, seed).lows for seed in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()


def test_groups_of_unequal_size_count_as_fewer():
    old, new = flipped(1000, 0.1)
    cluster = np.minimum(np.arange(1000), 100)
    found = resample(pair(old, new, cluster), 1000, 0)
    assert found.num_clusters == 101
    assert found.effective_clusters < 2


def test_alikeness_is_one_for_copies_and_none_for_rows_of_their_own():
    old, new = flipped(300, 0.1)
    assert alikeness(pair(np.repeat(old, 4), np.repeat(new, 4), np.repeat(np.arange(300), 4))) == pytest.approx(1)
    assert alikeness(pair(old, new)) == 0
    assert alikeness(pair(np.repeat(old, 4), np.repeat(new, 4), np.tile(np.arange(300), 4))) < 0.05
    assert alikeness(pair(old, new, np.zeros(300, dtype=int))) == 1


def test_holm_is_that_of_the_book():
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == (True, False, False, True)
    assert holm([], 0.05) == ()
    assert holm([0.049], 0.05) == (True,)


def scores(value: np.ndarray, version: str = "0041", groups: int | None = None) -> Scores:
    cluster = {} if groups is None else {"cluster": [index % groups for index in range(len(value))]}
    return Scores.of(version, "frozen", "rows", {"value": value, **cluster})


def test_a_margin_that_the_rows_cannot_resolve_is_refused_with_the_way_out():
    settings = GateSettings()
    enough = resolution_finding(resolution(scores(flipped(2000, 0)[0]), settings), settings)
    assert enough.passed
    assert "on 2,000 frozen rows" in enough.sentence
    short = resolution_finding(resolution(scores(flipped(500, 0)[0]), settings), settings)
    assert not short.passed
    assert "set margin = 0.019" in short.sentence
    assert "or bring about" in short.sentence


def test_the_margin_that_is_proposed_is_resolved():
    found = resolution(scores(flipped(500, 0)[0]), GateSettings())
    assert found.power(found.resolved(0.8, 0.95), 0.95) == pytest.approx(0.8)


def test_one_group_resolves_no_margin():
    settings = GateSettings()
    finding = resolution_finding(resolution(scores(flipped(2000, 0)[0], groups=1), settings), settings)
    assert not finding.passed
    assert "bring rows of more groups" in finding.sentence


def test_versions_that_differ_on_more_rows_resolve_less():
    old, few = flipped(2000, 0.02)
    _, many = flipped(2000, 0.2)
    settings = GateSettings()
    powers = [
        resolution(scores(old), settings, last=scores(new, "0040")).power(settings.margin, settings.confidence)
        for new in (few, many)
    ]
    assert powers[0] > 0.8 > 0.5 > powers[1]
    assert resolution(scores(old), settings).power(0.01, 0.95) == pytest.approx(powers[0], abs=0.05)
