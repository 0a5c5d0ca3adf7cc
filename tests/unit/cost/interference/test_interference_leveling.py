"""Our form: bandwidth that runs out and is shared, by hand in small cases; and what of a time is fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import sample

from mosaic.cost import Bandwidths, LeveledBandwidth, Leveling
from mosaic.cost.interference.fixed_time import Timed, fixed_time
from mosaic.cost.interference.leveling import Demand, Taker
from mosaic.profile import Phase

F, B = Phase.FORWARD, Phase.BACKWARD


def busy(share: float, headroom: float = 1.0, idle: float = 0.0) -> Taker:
    ask = share / (1 - idle)
    return Taker(share, idle, ask, min(1.0, ask * headroom))


def extra(law: Leveling, own: Taker, *others: Taker) -> float:
    return law.extra_share(own, others)


def test_below_the_capacity_nobody_loses_anything() -> None:
    law = Leveling(draw=0.1, fairness=0.5)
    assert extra(law, busy(0.5), busy(0.3), busy(0.2)) == 0


def test_in_proportion_all_are_slowed_down_alike_whatever_their_headroom() -> None:
    law = Leveling(draw=0.1, fairness=0.0)
    assert extra(law, busy(0.9), busy(0.6, headroom=1.5)) == pytest.approx(0.5)
    assert extra(law, busy(0.6, headroom=1.5), busy(0.9)) == pytest.approx(0.5)


def test_max_min_leaves_those_alone_that_ask_for_less_than_the_level() -> None:
    law = Leveling(draw=0.1, fairness=1.0)
    small, large = busy(0.2, headroom=5.0), busy(1.0)
    assert extra(law, small, large) == 0  # 0.2 of 1.0 that its slots could draw; the level is 0.8
    assert extra(law, large, small) == pytest.approx(1 / 0.8 - 1)


def test_what_is_drawn_comes_to_the_capacity() -> None:
    law = Leveling(draw=0.1, capacity=0.9, fairness=0.6, cache=0.2)
    takers = [busy(0.3, 2.0, idle=0.1), busy(0.5, 1.2), busy(0.4), busy(0.1, 4.0)]
    total = sum(one.share for one in takers)
    drawn = 0.0
    for index, one in enumerate(takers):
        others = (*takers[:index], *takers[index + 1 :])
        drawn += one.share * (1 + 0.2 * (total - one.share)) / (1 + law.extra_share(one, others))
    assert drawn == pytest.approx(0.9)


def test_fixed_time_is_not_slowed_down() -> None:
    law = Leveling(draw=0.1, fairness=0.0)
    # Both use 0.8; a half of the first one's time is launches, in which it draws nothing.
    launching = Taker(0.4, 0.5, 0.8, 0.8)
    assert 0 < extra(law, launching, busy(0.8)) < extra(law, busy(0.8), launching)


def test_caches_cost_those_that_have_no_headroom_even_where_bandwidth_is_left() -> None:
    law = Leveling(draw=0.1, cache=0.5)
    assert extra(law, busy(0.3), busy(0.2)) == pytest.approx(0.1)
    assert extra(law, busy(0.3, headroom=2.0), busy(0.2)) == 0


def test_a_module_s_own_draw_is_used_and_the_device_s_for_others() -> None:
    law = Leveling(draw=0.1, draws={"a": 0.2})
    assert law.taker(Demand(module="a", quota=3, share=0.1)).cap == pytest.approx(0.6)
    assert law.taker(Demand(module="x", quota=3, share=0.1)).cap == pytest.approx(0.3)
    assert law.taker(Demand(module="x", quota=3, share=0.5)).cap == 0.5
    assert law.taker(Demand(module="a", quota=16, share=0.1)).cap == 1.0


@pytest.mark.parametrize(
    "wrong",
    [{"draw": 0.0}, {"capacity": 0.0}, {"fairness": 1.1}, {"idle": -0.1}, {"cache": float("inf")}, {"draws": {"a": 0}}],
)
def test_coefficients_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="capacity and draws are above 0"):
        Leveling(**{"draw": 0.1, **wrong})


def test_the_form_takes_shares_of_the_time_alone_and_is_zero_alone_and_without_coefficients() -> None:
    bandwidths = Bandwidths(
        replace(sample(q, 1.0, module=m), bandwidth_utilisation=b) for m, b in (("a", 0.9), ("b", 0.6)) for q in (1, 8)
    )
    form = LeveledBandwidth({F: Leveling(draw=0.01, fairness=0.0)}, bandwidths)
    assert form.extra_ms("a", F, quota=1, alone_ms=10.0, beside=[("b", 1)]) == pytest.approx(5.0)
    assert form.extra_ms("a", F, quota=1, alone_ms=10.0, beside=[]) == 0
    assert form.extra_ms("a", B, quota=1, alone_ms=10.0, beside=[("b", 1)]) == 0
    assert not form.is_pairwise
    assert not form.is_zero
    assert LeveledBandwidth({}, bandwidths).is_zero


def curve(fixed_ms: float, work_ms: float, traffic_ms: float, rate: float = 1.0) -> list[Timed]:
    found = []
    for quota in range(1, 17):
        time = fixed_ms + max(work_ms / quota, traffic_ms / min(1.0, rate * quota))
        found.append(Timed(quota, time, traffic_ms / time))
    return found


@pytest.mark.parametrize(
    ("fixed_ms", "work_ms", "traffic_ms", "rate"),
    [(1.0, 40, 3.0, 1.0), (2.0, 10, 3.0, 0.1), (0.0, 40, 0.5, 1.0), (0.5, 30, 4.0, 0.2)],
)
def test_fixed_time_is_found_under_a_roofline(fixed_ms: float, work_ms: float, traffic_ms: float, rate: float) -> None:
    found = fixed_time(curve(fixed_ms, work_ms, traffic_ms, rate)) * traffic_ms
    assert found == pytest.approx(fixed_ms, abs=0.06)


def test_two_quotas_or_no_bandwidth_tell_no_fixed_time() -> None:
    assert fixed_time(curve(1.0, 40, 3.0)[:2]) == 0
    assert fixed_time([Timed(q, 1.0, 0.0) for q in (1, 2, 4)]) == 0


def test_bandwidths_know_the_fixed_time_of_a_module_that_was_sampled() -> None:
    samples = [replace(sample(p.quota, p.time_ms), bandwidth_utilisation=p.share) for p in curve(1.0, 40.0, 3.0)]
    assert Bandwidths(samples).fixed("m", F) == pytest.approx(1 / 3, abs=0.02)
    assert Bandwidths(samples).fixed("m", B) == 0
