"""Spindle's piecewise alpha-beta estimator: coefficients, inverse, and where it may be asked."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planning_cases import sample

from mosaic.cost import AlphaBetaSurface
from mosaic.cost.surfaces.sampling import held_out_errors
from mosaic.profile import Phase, Sample

BOUNDED = settings(max_examples=200, deadline=None, derandomize=True)


def test_one_piece_gives_its_coefficients_back() -> None:
    surface = AlphaBetaSurface([sample(q, 2 + 24 / (q * d), degree=d) for q in (1, 4, 16) for d in (1, 2, 4)])
    (piece,) = surface.pieces
    assert (piece.first, piece.last) == (1, 64)
    assert piece.alpha_ms == pytest.approx(2)
    assert piece.beta_ms == pytest.approx(24)
    assert surface.time_ms(2, 4) == pytest.approx(5)


def test_two_pieces_find_the_corner_of_a_roofline() -> None:
    surface = AlphaBetaSurface([sample(q, max(4.0, 24 / q)) for q in range(1, 17)])
    assert [(piece.first, piece.last) for piece in surface.pieces] == [(1, 6), (6, 16)]
    assert [piece.alpha_ms for piece in surface.pieces] == pytest.approx([0, 4], abs=1e-3)
    assert [piece.beta_ms for piece in surface.pieces] == pytest.approx([24, 0], abs=1e-2)


def test_noise_does_not_earn_pieces() -> None:
    dice = random.Random(0)
    samples = [sample(q, (1 + 24 / q) * math.exp(dice.gauss(0, 0.03))) for q in range(1, 17)]
    surface = AlphaBetaSurface(samples)
    assert len(surface.pieces) == 1
    assert surface.time_ms(1, 8) == pytest.approx(4, rel=0.03)


def test_over_devices_only_the_whole_device_counts() -> None:
    samples = [sample(q, 2 + 24 / (q * d), degree=d) for q in (1, 16) for d in (1, 2, 4, 8)]
    surface = AlphaBetaSurface(samples, over="degree")
    assert (surface.pieces[0].first, surface.pieces[-1].last) == (1, 8)
    assert surface.quotas(2) == (16,)
    assert surface.time_ms(4, 16) == pytest.approx(2 + 24 / 64)
    with pytest.raises(ValueError, match="quota of 1 slots lies outside"):
        surface.time_ms(4, 1)


def test_the_inverse_is_linear_between_valid_allocations() -> None:
    surface = AlphaBetaSurface([sample(16, 16 / d, degree=d) for d in (1, 2, 4, 8)], over="degree")
    # T(2) = 8 and T(4) = 4; halfway in time is halfway in devices (Eq. 11), although T(3) is 16/3.
    assert surface.inverse(6.0, (1, 2, 4, 8)) == pytest.approx(3.0)
    assert surface.inverse(16 / 3) == pytest.approx(3.0)
    assert surface.inverse(99.0, (2, 4)) == 2.0


def test_the_inverse_of_a_time_that_is_never_reached_is_refused() -> None:
    surface = AlphaBetaSurface([sample(16, 16 / d, degree=d) for d in (1, 2, 4, 8)], over="degree")
    for time_ms in (1.0, math.nan):
        with pytest.raises(ValueError, match="is less than 2 ms, the time at 8"):
            surface.inverse(time_ms)


def test_nothing_is_extrapolated() -> None:
    surface = AlphaBetaSurface([sample(2, 4.0), sample(4, 2.0)])
    with pytest.raises(ValueError, match="outside the sampled quotas 2, 4"):
        surface.time_ms(1, 8)
    with pytest.raises(ValueError, match="n=8 lies outside the sampled 2 to 4"):
        surface.at(8)


def test_infeasible_points_stay_infeasible() -> None:
    failed = Sample(module="m", phase=Phase.FORWARD, quota=1, infeasible="OutOfMemoryError")
    surface = AlphaBetaSurface([failed, sample(2, 4.0), sample(4, 2.0)])
    assert surface.quotas(1) == (2, 3, 4)
    with pytest.raises(ValueError, match="OutOfMemoryError"):
        surface.time_ms(1, 1)


def test_one_sample_is_one_point() -> None:
    surface = AlphaBetaSurface([sample(3, 7.0)])
    assert surface.time_ms(1, 3) == 7.0
    assert surface.inverse(9.0) == 3.0


def test_a_phase_that_takes_no_time_is_zero_everywhere() -> None:
    assert AlphaBetaSurface([sample(1, 0.0), sample(4, 0.0)]).time_ms(1, 2) == 0.0


def test_its_held_out_errors_are_recorded_under_its_name() -> None:
    samples = [sample(q, 2 + 24 / q) for q in (1, 4, 8, 16)]
    found = held_out_errors(samples, form="alpha-beta", make=AlphaBetaSurface)
    assert found is not None
    assert (found.form, found.count) == ("alpha-beta", 2)
    assert found.largest < 1e-6


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e3), min_size=1, max_size=12))
@BOUNDED
def test_it_falls_but_no_faster_than_n_grows_and_is_continuous(times: dict[int, float]) -> None:
    surface = AlphaBetaSurface([sample(q, t) for q, t in times.items()])
    counts = range(min(times), max(times) + 1)
    for before, after in itertools.pairwise(surface.at(n) for n in counts):
        assert after <= before * (1 + 1e-9)
    for before, after in itertools.pairwise(n * surface.at(n) for n in counts):
        assert after >= before * (1 - 1e-9)
    for left, right in itertools.pairwise(surface.pieces):
        assert left.time_ms(left.last) == pytest.approx(right.time_ms(left.last))
    assert all(piece.alpha_ms >= 0 and piece.beta_ms >= 0 for piece in surface.pieces)


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e3), min_size=2, max_size=8), st.floats(0, 1))
@example({38: 1.0, 39: 1.0, 3: 673.0}, 0.0)
@example({53: 0.001, 2: 1.0, 57: 1.0, 1: 3.0}, 0.0)
@BOUNDED
def test_the_inverse_meets_its_time(times: dict[int, float], share: float) -> None:
    surface = AlphaBetaSurface([sample(q, t) for q, t in times.items()])
    slow, fast = surface.at(min(times)), surface.at(max(times))
    aim = fast + share * (slow - fast)
    n = surface.inverse(aim)
    assert min(times) <= n <= max(times)
    # A chord between whole n lies above the curve, so what it finds is never too slow.
    assert surface.at(n) <= aim * (1 + 1e-6)
