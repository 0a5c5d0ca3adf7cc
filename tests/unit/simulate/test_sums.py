"""Gradients that are summed beside a step, on a network that the modules of a device share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic.cost.communication import GradientSum
from mosaic.simulate.sums import Summed, last_sum_ms


def summed(start_ms: float, end_ms: float, time_ms: float, buckets: int, *devices: int) -> Summed:
    own = GradientSum(time_ms=time_ms, buckets=buckets)
    return Summed(start_ms=start_ms, end_ms=end_ms, devices=devices, own=own)


def test_a_bucket_waits_for_those_of_other_modules_on_its_devices() -> None:
    first, beside = summed(0, 4, 2, 2, 0, 1), summed(0, 4, 2, 1, 1, 2)
    assert last_sum_ms([first]) == pytest.approx(4 + 1)
    assert last_sum_ms([first, beside]) == pytest.approx(4 + 1 + 2)  # all that is ready at 4
    assert last_sum_ms([first, summed(0, 4, 2, 1, 2, 3)]) == pytest.approx(4 + 2)
    assert last_sum_ms([]) == last_sum_ms([summed(0, 4, 0, 1, 0)]) == 0.0


PARTS = st.lists(
    st.builds(
        lambda start, length, time, buckets, device: summed(start, start + length, time, buckets, device, device + 1),
        *(st.floats(0, 50), st.floats(0, 50), st.floats(0.1, 50), st.integers(1, 4), st.integers(0, 3)),
    ),
    max_size=5,
)


@given(PARTS)
def test_sums_end_no_sooner_than_the_busiest_device_and_no_later_than_all_in_turn(parts: list[Summed]) -> None:
    end_ms = last_sum_ms(parts)
    busy = [sum(p.own.time_ms for p in parts if device in p.devices) for device in range(5)]
    assert end_ms >= max(busy) - 1e-9
    assert end_ms <= max((p.end_ms for p in parts), default=0.0) + sum(p.own.time_ms for p in parts) + 1e-9
