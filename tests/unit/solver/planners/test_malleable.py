"""Spindle's continuous optimum and its two whole numbers of devices, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from mosaic.solver.planners.malleable import AslTuple, Interpolation, MetaOp, continuous_optimum, rounded, two_points

SEVEN_THREE = MetaOp(degrees=(1, 2), times=(7.0, 3.0), num_operators=12)
"""The Spindle paper's example (Fig. 5a): T(1) : T(2) = 7 : 3, twelve operators."""


def linear(num_operators: int, *degrees: int) -> MetaOp:
    return MetaOp(degrees=degrees, times=tuple(12.0 / degree for degree in degrees), num_operators=num_operators)


def test_the_papers_example_gives_8_4_and_3_6_of_12_operators() -> None:
    end, devices = continuous_optimum([SEVEN_THREE, SEVEN_THREE], 3)
    assert end == pytest.approx(50.4)
    assert devices == pytest.approx((1.5, 1.5))
    high, low = two_points(SEVEN_THREE, devices[0], end)
    assert (high.degree, low.degree) == (2, 1)
    assert (high.count, low.count) == pytest.approx((8.4, 3.6))
    assert rounded((high, low), 12) == (AslTuple(degree=2, count=8), AslTuple(degree=1, count=4))


def test_equation_11_as_printed_gives_6_and_6_for_the_same_example() -> None:
    end, devices = continuous_optimum([SEVEN_THREE, SEVEN_THREE], 3, "time")
    assert end == pytest.approx(60.0)
    assert devices == pytest.approx((1.5, 1.5))
    assert [one.count for one in two_points(SEVEN_THREE, devices[0], end)] == pytest.approx([6.0, 6.0])


@pytest.mark.parametrize(("interpolation", "devices"), [("speedup", 1 + (7 / 5 - 1) / (7 / 3 - 1)), ("time", 1.5)])
def test_between_two_degrees_the_inverse_is_linear_in_speedup_or_in_time(
    interpolation: Interpolation, devices: float
) -> None:
    assert SEVEN_THREE.devices_for(5.0, interpolation) == pytest.approx(devices)


@pytest.mark.parametrize("interpolation", ["speedup", "time"])
def test_at_a_degree_and_beyond_both_inverses_agree(interpolation: Interpolation) -> None:
    assert SEVEN_THREE.devices_for(7.0, interpolation) == pytest.approx(1)
    assert SEVEN_THREE.devices_for(3.0, interpolation) == pytest.approx(2)
    assert SEVEN_THREE.devices_for(14.0, interpolation) == pytest.approx(0.5)  # shares one device
    assert SEVEN_THREE.devices_for(1.0, interpolation) == 2  # as fast as it gets


@pytest.mark.parametrize(
    ("level", "num_devices", "end", "devices"),
    [
        pytest.param([linear(3, 1, 2, 4), linear(1, 1, 2, 4)], 4, 12.0, (3.0, 1.0), id="by their work"),
        pytest.param(
            [MetaOp(degrees=(1,), times=(9.0,), num_operators=1), linear(1, 1, 2, 4)],
            4,
            9.0,
            (1.0, 12 / 9),
            id="never before the slowest module on all devices",
        ),
        pytest.param([linear(1, 1)] * 3, 2, 18.0, (2 / 3, 2 / 3, 2 / 3), id="parts of a device"),
    ],
)
def test_devices_are_shared_as_worked_out_by_hand(
    level: list[MetaOp], num_devices: int, end: float, devices: tuple[float, ...]
) -> None:
    found = continuous_optimum(level, num_devices)
    assert found[0] == pytest.approx(end)
    assert found[1] == pytest.approx(devices)


def test_modules_that_take_no_time_get_no_share_and_still_run() -> None:
    nothing = MetaOp(degrees=(1,), times=(0.0,), num_operators=4)
    end, devices = continuous_optimum([nothing, nothing], 1)
    assert (end, devices) == (0.0, (0.0, 0.0))
    assert two_points(nothing, 0.0, end) == (AslTuple(degree=1, count=4),)


def test_a_whole_number_of_devices_needs_no_second_tuple() -> None:
    assert two_points(SEVEN_THREE, 2.0, 36.0) == (AslTuple(degree=2, count=12),)


def test_below_the_first_degree_idling_stands_for_the_lower_tuple() -> None:
    assert two_points(linear(5, 2, 4), 0.7, 100.0) == (AslTuple(degree=2, count=5),)


def test_a_tuple_rounded_to_nothing_is_dropped() -> None:
    assert rounded((AslTuple(degree=2, count=0.4), AslTuple(degree=1, count=2.6)), 3) == (AslTuple(degree=1, count=3),)


@pytest.mark.parametrize(("degrees", "times"), [((), ()), ((1, 2), (3.0,)), ((1, 2), (3.0, 3.0)), ((1,), (-1.0,))])
def test_times_that_do_not_fall_are_refused(degrees: tuple[int, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a time for each degree, and they fall"):
        MetaOp(degrees=degrees, times=times, num_operators=1)
