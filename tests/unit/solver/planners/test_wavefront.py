"""Spindle's wavefront scheduling of one level, step by step."""

from __future__ import annotations

import pytest

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


WIDE = MetaOp(degrees=(1, 2, 4), times=(8.0, 4.0, 2.0), num_operators=4)
THREE = MetaOp(degrees=(3,), times=(2.0,), num_operators=2)
BOTH = MetaOp(degrees=(1, 2), times=(4.0, 2.0), num_operators=4)
PAPER = ([SEVEN_THREE, SEVEN_THREE], [EIGHT_AND_FOUR, EIGHT_AND_FOUR], 3)


@pytest.mark.parametrize(
    ("level", "waves"),
    [
        # Wave 0: 8 on two devices take 24, and 3 of the other on one take 21; then the other way round; then what is
        # left, one operator each, of which the first gets the idle device.
        pytest.param(
            PAPER, [[(0, 2, 8), (1, 1, 3)], [(0, 1, 3), (1, 2, 8)], [(0, 2, 1), (1, 1, 1)]], id="the paper's example"
        ),
        pytest.param(
            ([flat(2.0, 6), flat(3.0, 4)], [one(1, 6), one(1, 4)], 2), [[(0, 1, 6), (1, 1, 4)]], id="equal length"
        ),
        pytest.param(
            ([flat(1.0, 1), flat(5.0, 2)], [one(1, 1), one(1, 2)], 2),
            [[(0, 1, 1), (1, 1, 1)], [(1, 1, 1)]],
            id="a longer run is cut to the nearest number and at least one",
        ),
        # The wave has a device to spare, so two becomes four; the rest is extended anew beside nobody.
        pytest.param(
            ([WIDE, flat(2.0, 1)], [one(2, 4), one(1, 1)], 5), [[(0, 4, 1), (1, 1, 1)], [(0, 4, 3)]], id="own devices"
        ),
        # Both halves of the longer module run alone on two devices.
        pytest.param(([BOTH], [(*one(2, 2), *one(1, 2))], 2), [[(0, 2, 4)]], id="neighbouring waves are joined"),
        pytest.param(([THREE, THREE], [one(3, 2), one(3, 2)], 4), [[(0, 3, 2)], [(1, 3, 2)]], id="they take turns"),
        pytest.param(
            ([flat(0.0, 3), flat(1.0, 2)], [one(1, 3), one(1, 2)], 2),
            [[(0, 1, 3), (1, 1, 1)], [(1, 1, 1)]],
            id="operators that take no time",
        ),
    ],
)
def test_waves_are_those_worked_out_by_hand(level: tuple, waves: list[list[tuple[int, int, int]]]) -> None:
    assert cut(*level) == waves


def test_without_extension_idle_devices_stay_idle() -> None:
    assert cut(*PAPER, extend=False)[-1] == [(0, 1, 1), (1, 1, 1)]
