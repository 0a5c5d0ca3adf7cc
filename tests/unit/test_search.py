"""The exact search where its limits end it: bounds stay true, time is kept, what was proven stays proven."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.solver_runs import search
from mosaic.solver.generate import SHAPES, Recipe, generate


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("disturbed", [False, True])
def test_a_bound_given_early_is_never_above_what_a_longer_search_proves(shape, disturbed):
    """Six modules behind a backbone are enough for what comes before and after it to be judged apart."""
    made = generate(Recipe(shape=shape, num_modules=7, num_devices=4, disturbed=disturbed, seed=5))
    proven = search(made, seconds=60)
    assert proven.is_proven
    for seconds in (0.0, 1e-4, 1e-3, 1e-2):
        early = search(made, seconds=seconds)
        assert early.bound_ms <= proven.cost_ms * (1 + 1e-9) <= early.cost_ms * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_star_takes_as_long_as_its_encoders_without_it_and_then_its_backbone(seed):
    """A bound that counted what follows twice once called 944.4 ms optimal where there was a plan of 935.8 ms."""
    star = generate(Recipe(shape="star", num_modules=10, seed=seed))
    *encoders, backbone = star.modules
    whole, parallel = search(star, seconds=60), search(replace(star, modules=tuple(encoders)), seconds=60)
    assert whole.is_proven
    assert parallel.is_proven
    alone_ms = min(option.forward_ms + option.backward_ms for option in backbone.options)
    assert whole.cost_ms == pytest.approx(parallel.cost_ms + alone_ms, rel=1e-9)


@pytest.mark.timeout(60)  # questions about one stage used to run on for minutes after the limit
@pytest.mark.parametrize("shape", ["align", "star", "layered"])
def test_a_search_that_is_cut_off_keeps_its_time_and_has_a_plan_and_a_bound(shape):
    made = generate(Recipe(shape=shape, num_modules=40, num_devices=32, tight_memory=True))
    found = search(made, seconds=0.5)
    assert 0 < found.bound_ms <= found.cost_ms


@pytest.mark.timeout(60)
def test_disturbed_modules_do_not_keep_a_search_beyond_its_limit():
    made = generate(Recipe(shape="star", num_modules=10, disturbed=True))
    found = search(made, seconds=0.5)
    assert found.bound_ms <= found.cost_ms
