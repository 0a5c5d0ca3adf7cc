"""The simulator that stands in for what two cores cannot show."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from bench.cost.figures import COUNTS, RULES
from bench.cost.sampling import adaptive_order, curves_of, sample_at
from bench.cost.simulated import simulate
from bench.cost.simulator import NUM_SLOTS, Work, draw_works, finish_ms, together_ms
from bench.cost.surface import tenths
from mosaic.profile import Phase, Sample

HUNGRY = Work(name="h", arithmetic_ms=1, launch_ms=0, memory_ms=4, rate=0.25)
BUSY = Work(name="b", arithmetic_ms=40, launch_ms=1, memory_ms=0.01, rate=0.25)


@pytest.mark.parametrize("rule", RULES)
def test_a_module_alone_takes_its_time_alone(rule):
    for work in draw_works(8, random.Random(0)):
        assert together_ms([work], [4], rule) == [pytest.approx(work.alone_ms(4))]


@pytest.mark.parametrize("rule", RULES)
def test_nobody_is_faster_beside_others_and_bandwidth_is_not_exceeded(rule):
    works = draw_works(8, random.Random(1))
    times = together_ms(works, [2] * 8, rule)
    assert all(time >= work.alone_ms(2) * (1 - 1e-9) for time, work in zip(times, works, strict=True))
    drawn = math.fsum(work.memory_ms / time for work, time in zip(works, times, strict=True))
    assert drawn <= 1 + 1e-9


@pytest.mark.parametrize("rule", ["in proportion", "max-min"])
def test_two_that_want_all_bandwidth_get_half_of_it_each(rule):
    assert together_ms([HUNGRY, HUNGRY], [4, 4], rule) == [pytest.approx(8), pytest.approx(8)]
    assert together_ms([HUNGRY, BUSY], [4, 4], rule)[1] == pytest.approx(11, rel=0.01)


def test_who_ends_early_leaves_its_bandwidth_to_the_rest():
    short = Work(name="s", arithmetic_ms=1, launch_ms=0, memory_ms=1, rate=0.25)
    # Half speed until the short one ends at 2 ms, then full speed for the other 3 of 4 ms.
    assert finish_ms([HUNGRY, short], [4, 4], "in proportion") == pytest.approx(5)
    assert finish_ms([HUNGRY], [4], "in proportion") == pytest.approx(4)


def test_adaptive_sampling_is_counted_and_judged_only_where_it_did_not_look():
    curves = curves_of(
        Sample(module="m", phase=Phase.FORWARD, quota=q, times_ms=(max(16 / q, 2.0),)) for q in range(1, NUM_SLOTS + 1)
    )
    found = sample_at(curves, curves, {"m": adaptive_order(curves, "m", None, bound=0.05)}, {})
    assert found.counts == (3,)
    assert len(found.errors) == NUM_SLOTS - 3
    assert found.mean_error < 1e-6
    assert sample_at(curves, curves, {"m": tenths(NUM_SLOTS)}, {}).counts == (10,)


@pytest.mark.parametrize("rule", ["in proportion", "max-min"])
def test_our_form_errs_less_than_the_paper_s_on_shared_bandwidth(rule):
    """Fitted to 24 groups of two to eight with 1 % noise, judged on new groups."""
    models = [simulate(rule, seed)[2] for seed in range(3)]
    for count in COUNTS:
        none, full, ours = (
            statistics.fmean(error for errors in models for error in errors[count, form])
            for form in ("none", "full", "ours")
        )
        assert ours < min(full, none, 0.02), count
