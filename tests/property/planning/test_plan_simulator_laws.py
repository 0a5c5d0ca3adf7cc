"""Laws of simulated steps, of re-planning and of forbidden stages, on random small instances."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_cases import pair, profile_of

from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError
from mosaic.profile import Phase, Profile
from mosaic.simulate.step import simulate
from mosaic.solver import solve
from mosaic.solver.exact import search_exactly
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine

BOUNDED = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ROUNDING = 1 + 1e-9


@st.composite
def profiles(draw: st.DrawFn, *, max_modules: int = 6, disturbed: bool = False) -> Profile:
    names = "abcdef"[: draw(st.integers(2, max_modules))]
    work = st.floats(0.01, 30, allow_nan=False)

    def time_of(floor: float, scaling: float):
        return lambda degree, quota: floor + scaling / (degree * quota)

    possible = [(m, n) for i, m in enumerate(names) for n in names[i + 1 :]]
    pairs = []
    if disturbed and draw(st.booleans()):
        slowdown = st.floats(1.0, 2.0)
        pairs = [pair(m, n, draw(slowdown), phase=phase) for m in names for n in names if m != n for phase in Phase]
    return profile_of(
        {name: time_of(draw(work), draw(work)) for name in names},
        num_slots=draw(st.integers(1, 4)),
        degrees=(1, 2),
        edges=[edge for edge in possible if draw(st.integers(0, 3)) == 0],
        backward=time_of(draw(work), draw(work)),
        pairs=pairs,
    )


@given(profiles(disturbed=True))
@BOUNDED
def test_a_step_lies_between_its_chains_and_its_stages_and_keeps_the_order_of_slots(
    profile: Profile,
) -> None:
    plan = solve(profile.graph, CostModel.from_profile(profile), profile.device, num_devices=2)
    step = simulate(plan, profile.graph)
    chains = []
    for phase in Phase:
        length = {p.module: p.forward_ms if phase is Phase.FORWARD else p.backward_ms for p in plan.placements}
        chain: dict[str, float] = {}
        for name in profile.graph.topological_order():
            chain[name] = length[name] + max((chain[o] for o in profile.graph.predecessors(name)), default=0.0)
        chains.append(max(chain.values()))
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for placement in plan.placements:
        for cell in placement.cells:
            busy[cell] += placement.forward_ms + placement.backward_ms
    assert max(sum(chains), *busy.values()) <= step.makespan_ms * ROUNDING
    assert step.makespan_ms <= plan.predicted_ms * ROUNDING
    spans = {(span.part.module, span.phase): span for span in step.spans}
    assert len(spans) == 2 * len(profile.graph.names)
    for edge in profile.graph.edges:
        forward, backward = Phase.FORWARD, Phase.BACKWARD
        assert spans[edge.source, forward].end_ms <= spans[edge.target, forward].start_ms * ROUNDING
        assert spans[edge.target, backward].end_ms <= spans[edge.source, backward].start_ms * ROUNDING
    for i, one in enumerate(plan.placements):
        for other in plan.placements[i + 1 :]:
            for phase in Phase:
                first, second = sorted((spans[one.module, phase], spans[other.module, phase]), key=lambda s: s.end_ms)
                shares = set(one.cells) & set(other.cells)
                assert not shares or first.end_ms <= second.start_ms * ROUNDING


@given(profiles(max_modules=4))
@settings(BOUNDED, max_examples=20)
def test_forbidding_the_best_stages_in_turn_gives_plans_that_are_no_better(profile: Profile) -> None:
    cost, device = CostModel.from_profile(profile), profile.device
    options = all_options(profile.graph, cost=cost, device=device, num_devices=2)
    machine = Machine(num_devices=2, num_slots=device.num_slots, memory_bytes=0)
    best = search_exactly(profile.graph, options, cost=cost, machine=machine)
    for stage in best.stages:
        try:
            other = search_exactly(profile.graph, options, cost=cost, machine=machine, forbidden=[tuple(stage.choices)])
        except InfeasibleError:
            continue
        assert other.cost_ms >= best.cost_ms
        assert all(set(one.choices) != set(stage.choices) for one in other.stages)
        assert other.record.bound_ms == pytest.approx(other.cost_ms)
