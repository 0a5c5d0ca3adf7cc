"""Plans to run: chosen over a shared network by a simulated step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import linear, profile_of

from mosaic.cli.plan import proof_of
from mosaic.cost import CostModel
from mosaic.cost.communication import ModuleTraffic, RankedCost
from mosaic.hardware import Link
from mosaic.plan import Plan
from mosaic.simulate.step import simulate
from mosaic.solver.limits import SearchLimits
from mosaic.solver.runnable import WHOLE_DEVICE_PLANNERS, plan_to_run
from mosaic.solver.task import SearchOptions

NUM_DEVICES = 2
CROWDED = {"a": (8.0, 2.0), "b": (12.0, 8.0), "c": (20.0, 8.0)}
"""With the network to themselves, all three are best beside each other on both devices."""


class Case:
    """Independent modules on two devices, each with its work and with gradients to sum, in milliseconds."""

    def __init__(self, modules: dict[str, tuple[float, float]]) -> None:
        profile = profile_of({name: linear(work) for name, (work, _) in modules.items()}, num_slots=4, degrees=(1, 2))
        self.graph, self.device = profile.graph, profile.device
        traffic = {name: ModuleTraffic(parameter_gradients=round(ms * 1e6)) for name, (_, ms) in modules.items()}
        link = Link(gb_per_s=1.0, latency_us=0.0)
        self.cost = RankedCost(CostModel.from_profile(profile), traffic, link, NUM_DEVICES)

    def plan(self, method: str, limits: SearchLimits | None = None) -> Plan:
        search = SearchOptions(limits=limits or SearchLimits())
        return plan_to_run(method, self.graph, self.cost, self.device, num_devices=NUM_DEVICES, search=search)

    def step_ms(self, plan: Plan) -> float:
        return simulate(plan, self.graph, sums=self.cost.summed).makespan_ms


def test_a_plan_that_is_predicted_best_gives_way_to_one_whose_modules_do_not_wait_for_each_others_sums() -> None:
    case = Case(CROWDED)
    exact, chosen = case.plan("exact"), case.plan("auto")
    assert exact.search.status == "optimal"
    assert exact.predicted_ms < chosen.predicted_ms
    assert case.step_ms(chosen) < 0.95 * case.step_ms(exact)
    assert chosen.search.simulated_ms == pytest.approx(case.step_ms(chosen))
    assert chosen.search.status == "feasible"
    assert chosen.search.bound_ms == pytest.approx(exact.predicted_ms)
    assert "no plan is predicted faster than" in proof_of(chosen)
    assert "simulated step over a shared network" in proof_of(chosen)


MODULE = st.tuples(st.sampled_from([4.0, 8.0, 12.0, 20.0]), st.sampled_from([0.0, 1.0, 4.0]))


@settings(max_examples=15, deadline=None)
@given(st.lists(MODULE, min_size=2, max_size=3))
def test_no_planner_of_whole_modules_has_a_plan_with_a_shorter_step(modules: list[tuple[float, float]]) -> None:
    case = Case(dict(zip("abc", modules, strict=False)))
    chosen, exact = case.plan("auto"), case.plan("exact")
    others = [exact, *(case.plan(method) for method in WHOLE_DEVICE_PLANNERS)]
    assert case.step_ms(chosen) <= min(map(case.step_ms, others)) * (1 + 1e-5)
    assert chosen.search.bound_ms <= exact.predicted_ms + 1e-9
    is_proven = chosen.search.status == "optimal"
    assert not is_proven or chosen.predicted_ms == pytest.approx(exact.predicted_ms)
