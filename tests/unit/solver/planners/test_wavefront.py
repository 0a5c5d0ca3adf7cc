"""Spindle's wavefront scheduling of one level, step by step."""

from __future__ import annotations

from mosaic.solver.planners.malleable import AslTuple, MetaOp
from mosaic.solver.planners.wavefront import schedule_level

SEVEN_THREE = MetaOp(degrees=(1, 2), times=(7.0, 3.0), num_operators=12)
EIGHT_AND_FOUR = (AslTuple(degree=2, count=8), AslTuple(degree=1, count=4))


def flat(time: float, num_operators: int) -> MetaOp:
    return MetaOp(degrees=(1,), times=(time,), num_operators=num_operators)


def one(degree: int, count: int) -> tuple[AslTuple, ...]:
    return (AslTuple(degree=degree, count=count),)


def cut(*args: object, **more: object) -> list[list[tuple[int, int, int]]]:
    """Waves as (MetaOp, devices, operators)."""
    return [[(s.metaop, s.degree, s.count) for s in wave] for wave in schedule_level(*args, **more)]


def test_the_papers_example_is_cut_at_the_end_of_the_shorter_run() -> None:
    # Wave 0: 8 on two devices take 24, and 3 of the other on one take 21; then the other way round; then what is left,
    # one operator each, of which the first gets the idle device.
    assert cut([SEVEN_THREE, SEVEN_THREE], [EIGHT_AND_FOUR, EIGHT_AND_FOUR], 3) == [
        [(0, 2, 8), (1, 1, 3)],
        [(0, 1, 3), (1, 2, 8)],
        [(0, 2, 1), (1, 1, 1)],
    ]


def test_without_extension_idle_devices_stay_idle() -> None:
    assert cut([SEVEN_THREE, SEVEN_THREE], [EIGHT_AND_FOUR, EIGHT_AND_FOUR], 3, extend=False)[-1] == [
        (0, 1, 1),
        (1, 1, 1),
    ]


def test_runs_of_equal_length_are_not_cut() -> None:
    assert cut([flat(2.0, 6), flat(3.0, 4)], [one(1, 6), one(1, 4)], 2) == [[(0, 1, 6), (1, 1, 4)]]


def test_a_longer_run_is_cut_to_the_nearest_number_and_at_least_one() -> None:
    assert cut([flat(1.0, 1), flat(5.0, 2)], [one(1, 1), one(1, 2)], 2) == [[(0, 1, 1), (1, 1, 1)], [(1, 1, 1)]]


def test_what_was_cut_off_goes_back_to_its_own_number_of_devices() -> None:
    wide = MetaOp(degrees=(1, 2, 4), times=(8.0, 4.0, 2.0), num_operators=4)
    # The wave has a device to spare, so two becomes four; the rest is extended anew beside nobody.
    waves = cut([wide, flat(2.0, 1)], [one(2, 4), one(1, 1)], 5)
    assert waves == [[(0, 4, 1), (1, 1, 1)], [(0, 4, 3)]]


def test_neighbouring_waves_of_the_same_runs_are_joined() -> None:
    # Both halves of the longer module run alone on two devices.
    both = MetaOp(degrees=(1, 2), times=(4.0, 2.0), num_operators=4)
    assert cut([both], [(AslTuple(degree=2, count=2), AslTuple(degree=1, count=2))], 2) == [[(0, 2, 4)]]


def test_modules_that_do_not_fit_side_by_side_take_turns() -> None:
    wide = MetaOp(degrees=(3,), times=(2.0,), num_operators=2)
    assert cut([wide, wide], [one(3, 2), one(3, 2)], 4) == [[(0, 3, 2)], [(1, 3, 2)]]


def test_operators_that_take_no_time_are_scheduled_at_once() -> None:
    assert cut([flat(0.0, 3), flat(1.0, 2)], [one(1, 3), one(1, 2)], 2) == [[(0, 1, 3), (1, 1, 1)], [(1, 1, 1)]]
