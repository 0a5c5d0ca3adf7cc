"""The plans for several ranks that a trial takes."""

from __future__ import annotations

from planning_cases import linear, profile_of

from mosaic.cost import CostModel
from mosaic.ranks.plans import rank_plans_to_try
from mosaic.ranks.session import RANK_TRIAL
from mosaic.solver import solve


def test_nothing_is_tried_where_little_gain_is_predicted():
    profile = profile_of({"a": linear(4), "b": linear(8)}, num_slots=2, degrees=(1, 2))
    cost = CostModel.from_profile(profile)
    best = solve(profile.graph, cost, profile.device, num_devices=2)
    candidates = rank_plans_to_try(best, profile.graph, RANK_TRIAL, cost=cost)
    assert [plan.search.method for plan in candidates.plans] in (["data-parallel"], [best.search.method])
    assert all(placed.degree == 2 for placed in candidates.plans[0].placements)
    assert candidates.sentences[0].startswith("nothing is tried: ")
