"""Scaling surfaces: exact at samples, shaped like the data, never extrapolated."""

from __future__ import annotations

import pytest
from planning_cases import sample

from mosaic.cost import ScalingSurface
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample


def test_surface_returns_the_median_at_a_sample() -> None:
    surface = ScalingSurface([sample(1, 9.0, 8.0, 8.5), sample(2, 4.0), sample(8, 1.5, 1.7, 1.6)])
    assert [surface.time_ms(1, quota) for quota in (1, 2, 8)] == [8.5, 4.0, 1.6]


def test_surface_of_a_perfectly_scaling_module_is_exact_between_samples() -> None:
    surface = ScalingSurface([sample(quota, 24 / quota) for quota in (1, 4, 12)])
    assert surface.time_ms(1, 6) == pytest.approx(4.0)


def test_surface_of_a_launch_bound_module_is_flat_between_samples() -> None:
    surface = ScalingSurface([sample(quota, 3.0) for quota in (1, 4, 16)])
    assert [surface.time_ms(1, quota) for quota in range(1, 17)] == pytest.approx([3.0] * 16)


def test_surface_falls_between_falling_samples_even_where_it_bends() -> None:
    surface = ScalingSurface([sample(1, 100.0), sample(3, 99.0), sample(5, 10.0), sample(16, 9.9)])
    times = [surface.time_ms(1, quota) for quota in range(1, 17)]
    assert times == sorted(times, reverse=True)


def test_a_rise_within_the_quartiles_is_averaged_out() -> None:
    surface = ScalingSurface([sample(1, 10.0), sample(2, 4.5, 5.0, 6.0), sample(3, 4.5, 5.4, 6.0)])
    assert surface.time_ms(1, 2) == surface.time_ms(1, 3) == pytest.approx(5.2)


def test_a_rise_beyond_the_noise_is_kept_as_measured() -> None:
    surface = ScalingSurface([sample(1, 5.0, 5.1, 5.0), sample(2, 8.0, 8.1, 8.0)])
    assert [surface.time_ms(1, quota) for quota in (1, 2)] == [5.0, 8.0]


def test_a_quota_outside_the_samples_is_refused_with_the_sampled_ones() -> None:
    surface = ScalingSurface([sample(2, 4.0), sample(4, 2.0)])
    with pytest.raises(ValueError, match=r"quota of 8 slots lies outside the sampled quotas 2, 4 .*profile more"):
        surface.time_ms(1, 8)
    with pytest.raises(ValueError, match="quota of 1 slots"):
        surface.time_ms(1, 1)


def test_a_degree_outside_the_samples_is_refused_with_the_sampled_ones() -> None:
    surface = ScalingSurface([sample(2, 4.0), sample(2, 2.0, degree=2)])
    with pytest.raises(ValueError, match="degree 4 lies outside the sampled degrees 1, 2; profile it"):
        surface.time_ms(4, 2)


def test_a_degree_between_samples_lies_between_their_times() -> None:
    surface = ScalingSurface([sample(1, 8.0, degree=2), sample(1, 4.0, degree=4)])
    assert surface.time_ms(3, 1) == pytest.approx(16 / 3)


def test_a_degree_between_samples_needs_the_quota_at_both() -> None:
    surface = ScalingSurface([sample(1, 8.0, degree=2), sample(2, 5.0, degree=2), sample(1, 4.0, degree=4)])
    with pytest.raises(ValueError, match="of degree 4"):
        surface.time_ms(3, 2)


def test_a_single_sample_is_a_surface_of_one_point() -> None:
    surface = ScalingSurface([sample(3, 7.0)])
    assert surface.time_ms(1, 3) == 7.0
    assert list(surface.quotas(1)) == [3]


def test_measured_zeros_stay_finite_beside_positive_times() -> None:
    surface = ScalingSurface([sample(1, 1.0), sample(4, 0.0)])
    assert 0 < surface.time_ms(1, 4) <= surface.time_ms(1, 2) <= 1.0


def test_a_phase_that_takes_no_time_is_zero_everywhere() -> None:
    assert ScalingSurface([sample(1, 0.0), sample(4, 0.0)]).time_ms(1, 2) == 0.0


def test_samples_of_two_phases_do_not_make_a_surface() -> None:
    with pytest.raises(InvalidProfileError, match="one module and phase; found m backward, m forward"):
        ScalingSurface([sample(1, 1.0), sample(1, 1.0, phase=Phase.BACKWARD)])


def test_no_samples_do_not_make_a_surface() -> None:
    with pytest.raises(InvalidProfileError, match="found no samples"):
        ScalingSurface([])


def failed(quota: int, *, degree: int = 1) -> Sample:
    return Sample(module="m", phase=Phase.FORWARD, quota=quota, degree=degree, infeasible="OutOfMemoryError: 3 GiB")


def test_a_floor_and_perfect_scaling_add_up_exactly_between_two_samples() -> None:
    surface = ScalingSurface([sample(quota, 2 + 24 / quota) for quota in (1, 16)])
    assert [surface.time_ms(1, quota) for quota in range(1, 17)] == pytest.approx([2 + 24 / q for q in range(1, 17)])


def test_a_roofline_is_exact_once_its_corner_is_sampled() -> None:
    surface = ScalingSurface([sample(quota, max(4.0, 24 / quota)) for quota in (1, 6, 16)])
    assert [surface.time_ms(1, q) for q in range(1, 17)] == pytest.approx([max(4.0, 24 / q) for q in range(1, 17)])


def test_no_quota_between_samples_is_worth_more_than_its_slots() -> None:
    surface = ScalingSurface([sample(1, 100.0), sample(3, 99.0), sample(5, 70.0), sample(16, 25.0)])
    work = [quota * surface.time_ms(1, quota) for quota in range(1, 17)]
    assert work == sorted(work)


def test_scaling_that_is_better_than_perfect_is_kept_where_it_was_measured() -> None:
    surface = ScalingSurface([sample(2, 9.0), sample(8, 1.0)])
    assert surface.time_ms(1, 8) == 1.0
    assert 1.0 < surface.time_ms(1, 4) < 9.0


def test_unsorted_samples_make_the_same_surface() -> None:
    samples = [sample(1, 9.0), sample(4, 3.0), sample(8, 2.0)]
    times = [[ScalingSurface(order).time_ms(1, q) for q in range(1, 9)] for order in (samples, samples[::-1])]
    assert times[0] == times[1]


def test_two_samples_of_one_point_do_not_make_a_surface() -> None:
    with pytest.raises(InvalidProfileError, match="two samples at degree 1, quota 2; keep one"):
        ScalingSurface([sample(2, 1.0), sample(2, 1.1)])


def test_where_a_module_cannot_run_the_reason_is_given_and_the_rest_goes_on() -> None:
    surface = ScalingSurface([failed(1), sample(4, 4.0), sample(8, 2.0)])
    assert surface.quotas(1) == (4, 5, 6, 7, 8)
    assert surface.time_ms(1, 8) == 2.0
    for quota in (1, 3):
        with pytest.raises(ValueError, match=f"cannot run at degree 1, quota {quota}: OutOfMemoryError: 3 GiB"):
            surface.time_ms(1, quota)


def test_a_failure_between_two_samples_leaves_a_hole_up_to_both() -> None:
    surface = ScalingSurface([sample(1, 8.0), failed(4), sample(8, 2.0), sample(9, 2.0)])
    assert surface.quotas(1) == (1, 8, 9)


def test_a_degree_that_cannot_run_is_not_bridged_by_its_neighbours() -> None:
    surface = ScalingSurface([sample(1, 8.0), failed(1, degree=2), sample(1, 2.0, degree=4)])
    assert surface.degrees == (1, 4)
    with pytest.raises(ValueError, match="cannot run at degree 2"):
        surface.time_ms(2, 1)


def test_a_module_that_ran_nowhere_has_no_surface() -> None:
    with pytest.raises(InvalidProfileError, match="'m' forward ran at no quota: OutOfMemoryError"):
        ScalingSurface([failed(1), failed(2)])
