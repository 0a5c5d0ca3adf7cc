"""Degrees: which are looked at, which are offered between them, and what is said of those."""

from __future__ import annotations

import pytest
from planning_cases import linear, profile_of

from mosaic.cost import CostModel
from mosaic.cost.degrees import between_ms, degrees_between, degrees_to_measure
from mosaic.profile import Phase


@pytest.mark.parametrize(
    ("num_devices", "measured"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_powers_of_two_and_the_number_of_devices_are_measured(num_devices: int, measured: tuple[int, ...]) -> None:
    assert degrees_to_measure(num_devices) == measured


def test_every_degree_is_offered_up_to_sixteen_and_four_in_each_doubling_beyond() -> None:
    assert degrees_between((1, 8)) == tuple(range(1, 9))
    assert degrees_between((6, 16)) == tuple(range(6, 17))
    assert degrees_between((16, 48)) == (16, 20, 24, 28, 32, 40, 48)
    assert len(degrees_between(degrees_to_measure(256))) == 16 + 4 * 4
    assert degrees_between((3,)) == (3,)
    assert degrees_between((2, 5)) == (2, 3, 4, 5)


def test_times_between_are_exact_where_they_fall_with_the_degree() -> None:
    assert between_ms(4.0, 1.0, 2, 8, 5) == pytest.approx(8 / 5)
    cost = CostModel.from_profile(profile_of({"m": linear(8)}, num_slots=2, degrees=(1, 2, 8)))
    assert cost.degrees("m") == tuple(range(1, 9))
    assert cost.quotas("m", 5) == cost.quotas("m", 8)
    assert cost.time_ms("m", Phase.FORWARD, 5, 2) == pytest.approx(8 / 5 / 2)
    with pytest.raises(ValueError, match="degree 9 lies outside the sampled degrees"):
        cost.quotas("m", 9)
