"""The plans for several ranks that a trial takes."""

from __future__ import annotations

from typing import Any

from planning_cases import flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.plan import Plan
from mosaic.ranks.choosing.plans import Candidates, rank_plans_to_try
from mosaic.ranks.session import RANK_TRIAL
from mosaic.solver import solve


def chosen(num_devices: int = 2, memory: int = 0, **times: Any) -> tuple[Plan, Candidates]:
    degrees = (1, 2) if num_devices < 4 else (1, 2, 4)
    profile = profile_of(times, num_slots=2, degrees=degrees)
    cost = CostModel.from_profile(profile)
    best = solve(profile.graph, cost, profile.device, num_devices=num_devices)
    return best, rank_plans_to_try(best, profile.graph, RANK_TRIAL, cost=cost)


def test_data_parallel_training_comes_first_and_then_the_plan():
    best, found = chosen(a=flat(4), b=flat(4))
    plain, tried = found.plans[:2]
    assert (plain.search.method, tried.search.method) == ("data-parallel", "exact")
    assert tried == best
    assert all(placed.devices == (0, 1) and placed.slots == (0, 1) for placed in plain.placements)
    assert not plain.is_colocated
    assert found.sentences[0].startswith(
        "predicted for modules and what they send: data-parallel 16.00 ms, exact 8.00 ms"
    )


def test_nothing_is_tried_where_little_gain_is_predicted():
    best, found = chosen(a=linear(4), b=linear(8))
    assert [plan.search.method for plan in found.plans] in (["data-parallel"], [best.search.method])
    assert all(placed.degree == 2 for placed in found.plans[0].placements)
    assert found.sentences[0].startswith("nothing is tried: ")
