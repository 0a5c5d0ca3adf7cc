"""Algorithm 1: what may be merged, and what is merged first."""

from __future__ import annotations

import pytest
from planning_cases import Time, flat, linear, plan_of, profile_of

from mosaic.cost import CostModel
from mosaic.solver.gahc.clustering import cluster
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.limits import SearchLimits
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine


def test_algorithm_1_keeps_to_its_time_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    profile = profile_of(dict.fromkeys("abcd", flat(5)), num_slots=4)
    plan = plan_of(profile, limits=SearchLimits(effort=0))
    assert [stage.names for stage in plan.stages] == [("a",), ("b",), ("c",), ("d",)]
    assert "Algorithm 1 reached its limit (effort 0)" in caplog.text


@pytest.mark.parametrize(
    ("times", "num_slots", "edges", "stages"),
    [
        pytest.param({"a": flat(4), "b": flat(3)}, 2, [], ["ab"], id="modules that do not need the whole device share"),
        # Side by side they take just as long (line 15).
        pytest.param({"a": linear(4), "b": linear(4)}, 2, [], ["a", "b"], id="a gain of zero merges nothing"),
        pytest.param({"a": flat(1), "b": flat(9), "c": flat(8)}, 2, [], ["a", "bc"], id="the greatest gain first"),
        pytest.param(dict.fromkeys("abcd", flat(5)), 2, [], ["ab", "cd"], id="of equal gains the first"),
        pytest.param(dict.fromkeys("abcd", flat(5)), 4, [], ["abcd"], id="merging goes on until no merge gains"),
        pytest.param(dict.fromkeys("abc", flat(5)), 3, ["ab", "bc"], ["a", "b", "c"], id="what depends stays apart"),
        # a -> b and c -> d: once {a, d} is a stage, {b, c} would both follow and precede it.
        pytest.param(
            {"a": flat(9), "b": flat(5), "c": flat(5), "d": flat(9)}, 2, ["ab", "cd"], ["c", "ad", "b"], id="no cycle"
        ),
        pytest.param(
            {"h": flat(7), "x": flat(3), "y": flat(4)}, 2, ["xh", "yh"], ["xy", "h"], id="stages in topological order"
        ),
    ],
)
def test_algorithm_1_merges_as_worked_out_by_hand(
    times: dict[str, Time], num_slots: int, edges: list[str], stages: list[str]
) -> None:
    profile = profile_of(times, num_slots=num_slots, edges=[tuple(edge) for edge in edges])
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=1)
    machine = Machine(num_devices=1, num_slots=num_slots, memory_bytes=0)
    clustered = cluster(profile.graph, StageEvaluator(options, cost=cost, machine=machine))
    assert [set(stage.choices) for stage in clustered] == [set(names) for names in stages]
