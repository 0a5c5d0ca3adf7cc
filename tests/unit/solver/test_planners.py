"""The comparison planners on cases worked out by hand, and what each of them refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from planning_cases import Time, flat, linear, plan_of, profile_of

from mosaic.errors import InvalidPlanError
from mosaic.plan import Plan
from mosaic.profile import ModuleMemory, Profile


def seven_three(degree: int, quota: int) -> float:
    """The Spindle paper's example: T(1) : T(2) = 7 : 3, for twelve operators and one phase."""
    return {1: 42.0, 2: 18.0}[degree]


def by_degree(*times: float) -> Time:
    return lambda degree, quota: times[min(degree, len(times)) - 1]


def planned(
    name: str,
    times: dict[str, Time],
    num_devices: int,
    *,
    edges: Iterable[tuple[str, str]] = (),
    degrees: Sequence[int] = (1, 2, 3, 4),
    layers: int = 12,
) -> Plan:
    profile = profile_of(times, num_slots=1, degrees=degrees, edges=edges)
    return plan_of(profile, name, num_devices=num_devices, layers=layers)


def stages_of(result: Plan) -> list[dict[str, int]]:
    """Degree of each module, stage after stage."""
    return [{placed.module: placed.degree for placed in stage.placements} for stage in result.stages]


def counts_of(result: Plan) -> list[list[tuple[str, int, int]]]:
    """Module, first layer and layers of each part, stage after stage."""
    return [[(p.module, p.part.first, p.part.count) for p in stage.placements] for stage in result.stages]


def test_megatron_runs_every_module_in_turn_at_the_best_one_degree() -> None:
    times = {"a": linear(8), "b": flat(2), "c": by_degree(6, 3, 3, 5)}
    result = planned("megatron", times, 4, edges=[("c", "a")])
    assert [placed.devices for placed in result.placements] == [(0, 1, 2)] * 3  # all four: 2 + 5 + 2
    assert [placed.module for placed in result.placements] == ["b", "c", "a"]
    assert result.predicted_ms == pytest.approx(2 * (2 + 3 + 8 / 3))
    on_all = planned("data-parallel", times, 4, edges=[("c", "a")])
    assert [placed.devices for placed in on_all.placements] == [(0, 1, 2, 3)] * 3
    assert on_all.predicted_ms == pytest.approx(2 * (2 + 5 + 2))


GAINS = {"slow": by_degree(10, 9.9, 9.8), "gains": linear(8)}


@pytest.mark.parametrize(
    ("name", "times", "num_devices", "more", "stages", "step_ms"),
    [
        pytest.param("megatron", {"a": linear(8)}, 3, {"degrees": (1, 2)}, [{"a": 2}], 8, id="the largest degree"),
        # Eight devices for 5 : 3; with powers of two alone it is four each, which takes 10 / 4.
        pytest.param(
            "distmm",
            {"a": lambda d, q: 10 / d if d < 6 else 2, "b": lambda d, q: 6 / d if d < 4 else 2},
            8,
            {"degrees": (1, 2, 3, 4, 5, 8)},
            [{"a": 5, "b": 3}],
            2 * 2,
            id="any whole number of devices",
        ),
        pytest.param(
            "distmm",
            {"a": linear(8), "b": linear(4), "c": flat(3), "head": linear(8)},
            4,
            {"edges": [(name, "head") for name in "abc"]},
            [{"a": 2, "b": 1, "c": 1}, {"head": 4}],
            2 * (4 + 2),
            id="parallel modules are balanced over whole devices",
        ),
        # The flat module decides: the other could do with two devices, and gets four of the five that are free.
        pytest.param(
            "distmm",
            {"a": linear(8), "b": flat(5)},
            6,
            {"degrees": (1, 2, 4)},
            [{"a": 4, "b": 1}],
            2 * 5,
            id="devices left over go to a module that gains",
        ),
        pytest.param("distmm", GAINS, 4, {}, [{"slow": 3, "gains": 1}], 2 * 9.8, id="to the slowest"),
    ],
)
def test_stages_and_degrees_are_those_worked_out_by_hand(
    name: str, times: dict[str, Time], num_devices: int, more: dict, stages: list[dict[str, int]], step_ms: float
) -> None:
    result = planned(name, times, num_devices, **more)
    assert stages_of(result) == stages
    assert result.predicted_ms == pytest.approx(step_ms)


def test_spindle_slices_the_papers_example_over_three_waves() -> None:
    schedule = planned("spindle", {"a": seven_three, "b": seven_three}, 3, degrees=(1, 2))
    assert counts_of(schedule) == [[("a", 0, 8), ("b", 0, 3)], [("a", 8, 3), ("b", 3, 8)], [("a", 11, 1), ("b", 11, 1)]]
    assert schedule.sliced == ("a", "b")
    assert schedule.stages[0].forward_ms == pytest.approx(8 / 12 * 18)
    assert schedule.predicted_ms == pytest.approx(24 + 24 + 7)  # the continuous optimum is 50.4


def test_a_plan_with_slices_is_not_run_and_says_which_modules() -> None:
    profile = profile_of({"a": seven_three, "b": seven_three}, num_slots=1, degrees=(1, 2))
    sliced = plan_of(profile, "spindle", num_devices=3, layers=12)
    with pytest.raises(InvalidPlanError, match="the plan cuts a, b into parts; place layers as modules"):
        sliced.check_matches(graph=profile.graph, device=profile.device)
    whole = plan_of(profile, "spindle", num_devices=3, layers=1)
    whole.check_matches(graph=profile.graph, device=profile.device)


def profile_keeping(kept_bytes: dict[str, int], memory_bytes: int) -> Profile:
    memory = [ModuleMemory(module=name, resident_bytes=own, activation_bytes=0) for name, own in kept_bytes.items()]
    return profile_of(
        dict.fromkeys(kept_bytes, linear(8)),
        num_slots=2,
        degrees=(1, 2),
        memory=memory,
        memory_bytes=memory_bytes,
    )


@pytest.mark.parametrize("name", ["megatron", "sequential", "distmm"])
def test_a_degree_that_devices_hold_is_taken_where_the_best_one_does_not_fit(name: str) -> None:
    profile = profile_keeping({"a": 60, "b": 60}, 100)  # both devices would keep both modules
    result = plan_of(profile, name, num_devices=2, layers=1)
    assert sorted(placed.devices for placed in result.placements) == [(0,), (1,)]
