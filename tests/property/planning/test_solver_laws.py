"""Laws that every plan of every solver and its simulated step obey, on random small instances."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import pytest
from brute_force import best_stage, plan_by_brute_force
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_cases import pair, profile_of

from mosaic.artifact import parse, to_json
from mosaic.cost import Bandwidths, CostModel, Eq8, Eq8Interference, PairwiseInterference, Sharing
from mosaic.errors import InfeasibleError
from mosaic.plan import Plan
from mosaic.profile import ModuleMemory, Phase, Profile
from mosaic.simulate.step import simulate
from mosaic.solver import SearchOptions, StageEvaluator, solve
from mosaic.solver.exact import search_exactly
from mosaic.solver.options import DeploymentOption, all_options
from mosaic.solver.stage import Machine

BOUNDED = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Instance:
    profile: Profile
    num_devices: int

    def plan(self, method: str = "gahc", **search: object) -> Plan:
        plan = plan_by_brute_force if method == "brute_force" else partial(solve, method=method)
        return plan(
            self.profile.graph,
            CostModel.from_profile(self.profile),
            self.profile.device,
            num_devices=self.num_devices,
            search=SearchOptions(hold_memory=False, **search),  # the laws here are of single stages
        )

    def search_space(self, cost: CostModel) -> tuple[dict[str, tuple[DeploymentOption, ...]], Machine]:
        """The options of every module, and the devices."""
        device, count = self.profile.device, self.num_devices
        options = all_options(self.profile.graph, cost=cost, device=device, num_devices=count)
        return options, Machine(num_devices=count, num_slots=device.num_slots, memory_bytes=device.memory_bytes)


@st.composite
def instances(draw: st.DrawFn, max_modules: int = 4, max_devices: int = 2, max_slots: int = 4) -> Instance:
    names = "abcdef"[: draw(st.integers(1, max_modules))]
    num_slots = draw(st.integers(1, max_slots))
    num_devices = draw(st.integers(1, max_devices))
    work = st.floats(0.01, 30, allow_nan=False)

    def time_of(floor: float, scaling: float):
        return lambda degree, quota: floor + scaling / (degree * quota)

    forward = {name: time_of(draw(work), draw(work)) for name in names}
    possible = [(m, n) for i, m in enumerate(names) for n in names[i + 1 :]]
    edges = [edge for edge in possible if draw(st.integers(0, 3)) == 0]
    pairs = []
    if draw(st.booleans()):
        for m in names:
            for n in names:
                if m != n:
                    for beside_quota in {1, num_slots}:
                        slowdown = draw(st.floats(0.9, 2.0))
                        pairs += [pair(m, n, slowdown, phase=phase, beside_quota=beside_quota) for phase in Phase]
    memory = [
        ModuleMemory(module=name, resident_bytes=draw(st.integers(0, 60)), activation_bytes=draw(st.integers(0, 60)))
        for name in names
    ]
    profile = profile_of(
        forward,
        num_slots=num_slots,
        degrees=[degree for degree in (1, 2, 4) if degree <= max_devices],
        edges=edges,
        backward=time_of(draw(work), draw(work)),
        pairs=pairs,
        memory=memory,
        memory_bytes=draw(st.sampled_from([0, 120, 200])),
    )
    return Instance(profile=profile, num_devices=num_devices)


@given(instances(max_modules=5, max_devices=4, max_slots=6))
@BOUNDED
def test_every_plan_is_sound_and_has_the_cost_models_times_beside_its_neighbours(instance: Instance) -> None:
    # Building a Plan checks that partitions of a stage are disjoint and lie on the device.
    plan, cost = instance.plan(), CostModel.from_profile(instance.profile)
    plan.check_covers(instance.profile.graph)
    for stage in plan.stages:
        for device in range(instance.num_devices):
            here = [p for p in stage.placements if device in p.devices]
            assert sum(p.quota for p in here) <= instance.profile.device.num_slots
            needed = sum(cost.memory_bytes(p.module, p.degree) for p in here)
            assert needed <= (instance.profile.device.memory_bytes or needed)
        for placed in stage.placements:
            for phase, predicted in ((Phase.FORWARD, placed.forward_ms), (Phase.BACKWARD, placed.backward_ms)):
                expected = max(
                    cost.placed_ms(
                        placed.module,
                        phase,
                        placed.degree,
                        placed.quota,
                        beside=[(n.module, n.quota) for n in stage.placements if n != placed and device in n.devices],
                    )
                    for device in placed.devices
                )
                assert predicted == pytest.approx(expected)
    assert parse(Plan, to_json(plan), source="plan.json") == plan


@st.composite
def costs(draw: st.DrawFn) -> tuple[Instance, CostModel]:
    """Costs with measured pairs, Eq. 8 or the pairwise form."""
    instance = draw(instances())
    cost, weight = CostModel.from_profile(instance.profile), st.floats(0, 4)
    drawn = Bandwidths(
        replace(s, bandwidth_utilisation=draw(st.floats(0, 1))) for s in instance.profile.samples if s.degree == 1
    )
    kind = draw(st.sampled_from(["measured", "eq8", "pairwise"]))
    if kind == "eq8":
        eq8 = {phase: Eq8(e1=draw(st.floats(-2, 2)), e2=draw(weight), e3=draw(weight)) for phase in Phase}
        cost.interference = Eq8Interference(eq8, drawn)
    elif kind == "pairwise":
        sharing = {phase: Sharing(pressure=draw(weight), product=draw(weight)) for phase in Phase}
        cost.interference = PairwiseInterference(sharing, drawn)
    return instance, cost


@given(costs())
@BOUNDED
def test_the_time_of_a_stage_is_the_least_of_all_allocations_under_every_form(made: tuple[Instance, CostModel]) -> None:
    instance, cost = made
    names = instance.profile.graph.names
    options, machine = instance.search_space(cost)
    evaluated = StageEvaluator(options, cost=cost, machine=machine, tolerance=1e-6).evaluate(names)
    exact = best_stage(names, options, cost=cost, machine=machine, by_sum=True)
    assert (evaluated is None) == (exact is None)
    if evaluated is not None and exact is not None:
        assert evaluated.latency_ns == pytest.approx(exact[1].latency_ns, rel=2e-6, abs=10)


@given(instances())
@BOUNDED
def test_brute_force_is_at_most_gahc_which_is_at_most_sequential_and_spare_slots_never_cost(instance: Instance) -> None:
    exact, greedy, in_turn = (instance.plan(method) for method in ("brute_force", "gahc", "sequential"))
    assert exact.predicted_ms <= greedy.predicted_ms * ROUNDING
    assert greedy.predicted_ms <= in_turn.predicted_ms
    assert greedy.sequential_ms == in_turn.predicted_ms
    assert greedy.predicted_ms <= instance.plan(use_spare_slots=False).predicted_ms * ROUNDING


@given(instances(max_modules=6))
@BOUNDED
def test_a_step_lies_between_its_chains_and_its_stages_and_keeps_the_order_of_slots(instance: Instance) -> None:
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


@given(instances())
@settings(BOUNDED, max_examples=20)
def test_forbidding_the_best_stages_in_turn_gives_plans_that_are_no_better(instance: Instance) -> None:
    cost = CostModel.from_profile(instance.profile)
    options, machine = instance.search_space(cost)
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
