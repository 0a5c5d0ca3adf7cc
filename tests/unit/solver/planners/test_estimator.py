"""Spindle's estimate of times between degrees that were looked at."""

from __future__ import annotations

import pytest

from mosaic.solver.planners.estimator import PiecewiseAlphaBeta, looked_at


def test_each_piece_goes_through_the_times_at_its_ends() -> None:
    # 2 + 8 / n up to two devices, 4 + 4 / n beyond.
    estimate = PiecewiseAlphaBeta(degrees=(1, 2, 4), times=(10.0, 6.0, 5.0))
    assert [estimate.time(n) for n in (1, 2, 3, 4)] == pytest.approx([10, 6, 4 + 4 / 3, 5])


def test_powers_of_two_and_both_ends_are_looked_at() -> None:
    assert looked_at((1, 2, 3, 4, 5, 6)) == (1, 2, 4, 6)
    assert looked_at((3, 5, 8, 12)) == (3, 8, 12)


def test_degrees_outside_and_times_without_order_are_refused() -> None:
    with pytest.raises(ValueError, match="estimates go from 2 to 4"):
        PiecewiseAlphaBeta(degrees=(2, 4), times=(3.0, 2.0)).time(8)
    with pytest.raises(ValueError, match="give a time for each degree"):
        PiecewiseAlphaBeta(degrees=(2, 2), times=(3.0, 2.0))
