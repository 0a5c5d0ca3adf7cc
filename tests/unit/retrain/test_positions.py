from __future__ import annotations

from fractions import Fraction

import pytest

from mosaic.retrain.worker.positions import MAX_REPEATS, PositionStream, Source, shares_of

HALVES = (
    Source(name="new", rows=40, share=Fraction(7, 10)),
    Source(name="old", rows=30, share=Fraction(3, 10)),
)


def test_the_stream_is_the_one_that_days_before_had():
    span = PositionStream(HALVES, seed=3).span(1020, 1030)
    assert span.sources.tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert span.rows.tolist() == [17, 9, 1, 6, 3, 2, 23, 20, 28, 13]
    assert span.passes.tolist() == [17, 17, 10, 10, 17, 10, 17, 17, 18, 10]


def test_new_rows_have_the_rest_and_replayed_days_their_share_by_rows():
    shares = shares_of({"new": 1000}, {"a": 300, "b": 900}, 0.3)
    assert shares == {"new": Fraction(7, 10), "a": Fraction(3, 40), "b": Fraction(9, 40)}


def test_all_samples_are_new_without_replayed_rows_or_without_a_share_for_them():
    assert shares_of({"a": 1, "b": 1}, {"old": 0}, 0.3) == {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    assert shares_of({"a": 7}, {"old": 9}, 0) == {"a": Fraction(1)}


def test_a_single_replayed_row_comes_only_so_many_times_as_often_as_a_new_one():
    shares = shares_of({"new": 1000}, {"old": 1}, 0.3)
    assert shares["old"] / (shares["new"] / 1000) == pytest.approx(MAX_REPEATS, rel=0.01)
