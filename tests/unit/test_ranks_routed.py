"""Predicted communication of a plan: what really travels, where the solver took every result to go home."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from planning_cases import flat, profile_of
from ranks_graphs import plan_for, subsets
from ranks_straight import NAMES, Relay, batch

from mosaic.engine.finding.find import Finding
from mosaic.plan import Placement, Plan, Stage
from mosaic.profile import Phase
from mosaic.profiler import Ring
from mosaic.ranks.choosing.planning import cost_of_ranks, link_of
from mosaic.ranks.choosing.routed import Routes
from mosaic.ranks.colocate import found_for_ranks
from mosaic.ranks.running.activate import Examined, examine
from mosaic.solver.runnable import with_communication

SIZE = 4
ROWS = 6
Case = tuple[Relay, Finding, Examined]


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    model, sample = Relay(), batch(0, [ROWS] * SIZE, 0)
    finding, error = found_for_ranks(model, sample, NAMES)
    assert finding is not None, error
    return model, finding, examine(model, finding, sample)


def planned(case: Case, kind: str, ring: Ring) -> Plan:
    """Modules on random ranks, with the times that a solver predicts: 3 ms of compute in each phase."""
    model, finding, _ = case
    profile = profile_of(dict.fromkeys(NAMES, flat(3.0)), num_slots=1, degrees=(1, 2, 3, 4))
    cost = cost_of_ranks(model, finding, profile, ring, SIZE, sums_over_ring=False)

    def timed(one: Placement) -> Placement:
        forward, backward = (cost.time_ms(one.module, phase, one.degree, one.quota) for phase in Phase)
        return replace(one, forward_ms=forward, backward_ms=backward)

    members = subsets(kind, NAMES, SIZE, random.Random(1))
    plan = plan_for(model, batch(0, [ROWS] * SIZE, 0), members, SIZE)
    stages = tuple(Stage(placements=tuple(map(timed, stage.placements))) for stage in plan.stages)
    return with_communication(replace(plan, stages=stages), cost)


@pytest.mark.parametrize(
    ("kind", "latency_us"), [("disjoint", 0.0), ("overlapping", 0.0), ("any", 0.0), ("all", 50.0), ("equal", 0.0)]
)
def test_where_all_results_go_home_the_solver_s_times_are_right(case: Case, kind: str, latency_us: float):
    ring = Ring(latency_us=latency_us, gb_per_s=1e-5)
    plan = planned(case, kind, ring)
    assert (plan.communication_ms > 0) == (kind != "all")
    told = Routes(*case[1:], (), SIZE).told(plan, link_of(ring))
    for before, after in zip(plan.placements, told.placements, strict=True):
        assert after.route_forward_ms == pytest.approx(before.route_forward_ms)
        assert after.route_backward_ms == pytest.approx(before.route_backward_ms)
        assert (after.forward_ms, after.backward_ms) == pytest.approx((before.forward_ms, before.backward_ms))


def test_results_that_go_straight_take_less_and_nothing_else_changes(case: Case):
    ring = Ring(latency_us=0.0, gb_per_s=1e-5)
    plan = planned(case, "equal", ring)
    told = Routes(*case[1:], case[1].handovers, SIZE).told(plan, link_of(ring))
    assert told.communication_ms < plan.communication_ms
    assert told.predicted_ms < plan.predicted_ms
    for before, after in zip(plan.placements, told.placements, strict=True):
        assert after.forward_ms - after.route_forward_ms == pytest.approx(before.forward_ms - before.route_forward_ms)
        assert after.backward_ms - after.route_backward_ms == pytest.approx(3.0)
        assert replace(after, forward_ms=0, backward_ms=0, route_forward_ms=0, route_backward_ms=0) == replace(
            before, forward_ms=0, backward_ms=0, route_forward_ms=0, route_backward_ms=0
        )
    # From eye to project, on the same three of four ranks, nothing travels.
    assert told.placement("project").route_backward_ms < plan.placement("project").route_backward_ms


def test_a_way_takes_the_latency_of_each_partner_of_the_busiest_rank(case: Case):
    ring = Ring(latency_us=1000.0, gb_per_s=1e9)
    model, finding, examined = case
    plan = plan_for(model, batch(0, [ROWS] * SIZE, 0), dict.fromkeys(NAMES, (0,)), SIZE)
    told = Routes(finding, examined, (), SIZE).told(plan, link_of(ring))
    # Arguments from three ranks and results to them; of the first, whose input is data, only the results' gradients.
    assert told.placement("eye").route_forward_ms == pytest.approx(6.0)
    assert told.placement("eye").route_backward_ms == pytest.approx(3.0)
    assert told.placement("head").route_backward_ms == pytest.approx(6.0)


def test_a_profile_that_is_given_has_its_own_sums_and_routing_is_added(case: Case):
    model, finding, _ = case
    profile = profile_of(dict.fromkeys(NAMES, flat(3.0)), num_slots=1, degrees=(1, 2))
    ring = Ring(latency_us=1000.0, gb_per_s=1e-5)
    given = cost_of_ranks(model, finding, profile, ring, 2, sums_over_ring=False)
    made = cost_of_ranks(model, finding, profile, ring, 2)
    assert given.time_ms("eye", Phase.BACKWARD, 2, 1) == 3.0  # no rows travel, and its sum is in it
    assert given.time_ms("eye", Phase.FORWARD, 1, 1) > 3.0
    assert given.time_ms("eye", Phase.FORWARD, 1, 1) == made.time_ms("eye", Phase.FORWARD, 1, 1)
    assert made.communication("eye", 2, 1).reduce_ms > given.communication("eye", 2, 1).reduce_ms == 0.0
