"""Laws that every plan of every solver and its simulated step obey, on random small instances."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
from brute_force import best_stage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_cases import DrawnProfile, drawn_profiles

from mosaic.cost import BandwidthInterference, CostModel
from mosaic.errors import InfeasibleError
from mosaic.profile import Phase
from mosaic.simulate.step import simulate
from mosaic.solver import StageEvaluator
from mosaic.solver.exact import search_exactly
from mosaic.solver.options import DeploymentOption, all_options
from mosaic.solver.stage import Machine

BOUNDED = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ROUNDING = 1 + 1e-9


def search_space(drawn: DrawnProfile, cost: CostModel) -> tuple[dict[str, tuple[DeploymentOption, ...]], Machine]:
    """The options of every module, and the devices."""
    device, count = drawn.profile.device, drawn.num_devices
    options = all_options(drawn.profile.graph, cost=cost, device=device, num_devices=count)
    return options, Machine(num_devices=count, num_slots=device.num_slots, memory_bytes=device.memory_bytes)


@st.composite
def costs(draw: st.DrawFn) -> tuple[DrawnProfile, CostModel]:
    """Costs with measured pairs, or with shares assumed from bandwidths."""
    instance = draw(drawn_profiles())
    cost = CostModel.from_profile(instance.profile)
    if draw(st.booleans()):
        names, share = instance.profile.graph.names, st.floats(0, 1)
        drawn = {(name, phase): draw(share) for name in names for phase in Phase}
        cost.interference = BandwidthInterference(lambda module, phase, quota: drawn[module, phase] * quota / 4)
    return instance, cost


@given(costs())
@BOUNDED
def test_the_time_of_a_stage_is_the_least_of_all_allocations_under_every_form(
    made: tuple[DrawnProfile, CostModel],
) -> None:
    instance, cost = made
    names = instance.profile.graph.names
    options, machine = search_space(instance, cost)
    evaluated = StageEvaluator(options, cost=cost, machine=machine, tolerance=1e-6).evaluate(names)
    exact = best_stage(names, options, cost=cost, machine=machine, by_sum=True)
    assert (evaluated is None) == (exact is None)
    if evaluated is not None and exact is not None:
        assert evaluated.latency_ns == pytest.approx(exact[1].latency_ns, rel=2e-6, abs=10)


@given(drawn_profiles())
@BOUNDED
def test_spare_slots_never_cost_and_no_plan_is_slower_than_the_sequential_one(instance: DrawnProfile) -> None:
    greedy, in_turn = instance.plan(), instance.plan("sequential")
    assert greedy.predicted_ms <= in_turn.predicted_ms == greedy.sequential_ms
    assert greedy.predicted_ms <= instance.plan(use_spare_slots=False).predicted_ms * ROUNDING


@given(drawn_profiles(max_modules=6))
@BOUNDED
def test_a_step_lies_between_its_chains_and_its_stages_and_keeps_the_order_of_slots(instance: DrawnProfile) -> None:
    graph, plan = instance.profile.graph, instance.plan("auto")
    step = simulate(plan, graph)
    chains = []
    for phase in Phase:
        length = {p.module: p.forward_ms if phase is Phase.FORWARD else p.backward_ms for p in plan.placements}
        chain: dict[str, float] = {}
        for name in graph.topological_order():
            chain[name] = length[name] + max((chain[o] for o in graph.predecessors(name)), default=0.0)
        chains.append(max(chain.values()))
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for placement in plan.placements:
        for cell in placement.cells:
            busy[cell] += placement.forward_ms + placement.backward_ms
    assert max(sum(chains), *busy.values()) <= step.makespan_ms * ROUNDING
    assert step.makespan_ms <= plan.predicted_ms * ROUNDING
    spans = {(span.part.module, span.phase): span for span in step.spans}
    assert len(spans) == 2 * len(graph.names)
    for edge in graph.edges:
        forward, backward = Phase.FORWARD, Phase.BACKWARD
        assert spans[edge.source, forward].end_ms <= spans[edge.target, forward].start_ms * ROUNDING
        assert spans[edge.target, backward].end_ms <= spans[edge.source, backward].start_ms * ROUNDING
    for i, one in enumerate(plan.placements):
        for other in plan.placements[i + 1 :]:
            for phase in Phase:
                first, second = sorted((spans[one.module, phase], spans[other.module, phase]), key=lambda s: s.end_ms)
                shares = set(one.cells) & set(other.cells)
                assert not shares or first.end_ms <= second.start_ms * ROUNDING


@given(drawn_profiles())
@settings(BOUNDED, max_examples=20)
def test_forbidding_the_best_stages_in_turn_gives_plans_that_are_no_better(instance: DrawnProfile) -> None:
    cost = CostModel.from_profile(instance.profile)
    options, machine = search_space(instance, cost)
    search = partial(search_exactly, instance.profile.graph, options, cost=cost, machine=machine)
    best = search()
    for stage in best.stages:
        try:
            other = search(forbidden=[tuple(stage.choices)])
        except InfeasibleError:
            continue
        assert other.cost_ms >= best.cost_ms
        assert all(set(one.choices) != set(stage.choices) for one in other.stages)
        assert other.record.bound_ms == pytest.approx(other.cost_ms)
