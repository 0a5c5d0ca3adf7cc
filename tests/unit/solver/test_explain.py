"""Explanations of plans whose reasons are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import solve_instance
from planning_cases import flat, linear, pair, profile_of

from bench.solver.generate import Recipe, generate
from mosaic.cost import CostModel, NoInterference
from mosaic.profile import ModuleMemory, Phase, Profile
from mosaic.report.explanation import changes_text, explanation_table, reason_text
from mosaic.solver import solve
from mosaic.solver.explain import Explanation, explain
from mosaic.solver.instances.instance_cost import TableCost

ENCODERS = {"image": linear(6), "text": flat(4), "head": linear(8)}


def explained(profile: Profile, num_devices: int = 1) -> Explanation:
    cost = CostModel.from_profile(profile)
    return explain(solve(profile.graph, cost, profile.device, num_devices=num_devices), profile.graph, cost)


def encoders() -> Profile:
    return profile_of(ENCODERS, num_slots=4, edges=[("image", "head"), ("text", "head")])


def test_each_module_says_what_binds_it() -> None:
    reasons = {reason.module: reason for reason in explained(encoders()).modules}
    assert reasons["text"].decides == (Phase.FORWARD, Phase.BACKWARD)
    assert reasons["text"].limit == "no gain"
    assert reasons["image"].decides == ()
    assert reasons["image"].slack_ms == pytest.approx(2)
    assert reasons["head"].limit == "all slots"
    assert reasons["head"].next_quota is None
    assert reasons["head"].waits_for == ("image", "text")


def test_slots_held_by_others_bind_the_slowest() -> None:
    reasons = explained(profile_of({"a": lambda d, q: 4 + 12 / q, "b": lambda d, q: 4 + 12 / q}, num_slots=4)).modules
    assert [(reason.quota, reason.next_quota, reason.limit) for reason in reasons] == [(2, 3, "slots")] * 2


def test_room_that_is_not_used_is_explained_by_neighbours() -> None:
    pairs = [
        pair("slow", "fast", slowdown, phase=phase, quota=1, beside_quota=quota)
        for phase in Phase
        for quota, slowdown in ((1, 1.0), (7, 1.5))
    ]
    pairs += [pair("fast", "slow", 1.0, phase=phase) for phase in Phase]
    profile = profile_of({"slow": flat(10), "fast": linear(8)}, num_slots=8, pairs=pairs)
    reasons = {reason.module: reason for reason in explained(profile).modules}
    assert reasons["fast"].limit == "neighbours"


@pytest.mark.parametrize(("num_slots", "limit"), [(2, "memory"), (1, "all slots")])
def test_memory_is_named_where_it_and_not_slots_forbids_more_devices(num_slots: int, limit: str) -> None:
    """With one slot and all memory there is, both would still have a device each."""
    memory = [ModuleMemory(module=name, resident_bytes=60, activation_bytes=0) for name in ("big", "fixed")]
    times = {"big": lambda d, q: 8.0 / d, "fixed": lambda d, q: 9.0}
    profile = profile_of(times, num_slots=num_slots, degrees=(1, 2), memory=memory, memory_bytes=100)
    explanation = explained(profile, num_devices=2)
    assert explanation.plan.is_colocated
    assert next(reason for reason in explanation.modules if reason.module == "big").limit == limit
    twice = next(change for change in explanation.changes if change.what == "twice the memory")
    assert "twice the memory" in changes_text(explanation)
    assert limit == "memory" or twice.saves_ms == 0


def test_a_quota_beyond_the_next_one_that_would_be_faster_is_not_called_no_gain() -> None:
    """Work in waves: three slots are as fast as two, four are faster, and the other module holds them."""
    steps = {1: 12.0, 2: 6.0, 3: 6.0, 4: 4.0}
    times = {"waves": lambda d, q: steps[q], "other": lambda d, q: 12.0 / q}
    explanation = explained(profile_of(times, num_slots=4))
    assert explanation.plan.is_colocated
    reason = next(reason for reason in explanation.modules if reason.module == "waves")
    assert (reason.quota, reason.next_quota, reason.limit) == (2, 3, "slots")


@pytest.mark.parametrize("shape", ["layered", "align"])
def test_what_more_would_bring_is_what_a_larger_machine_is_solved_for(shape) -> None:
    made = generate(Recipe(shape=shape, num_modules=5, num_devices=2, seed=4, disturbed=True))
    answer, _ = solve_instance(made)
    slot, device, _ = explain(answer.plan, made.graph, TableCost(made)).changes
    assert made.disturbances
    for change, larger in ((slot, replace(made, num_slots=11)), (device, replace(made, num_devices=3))):
        assert change.predicted_ms == pytest.approx(solve_instance(larger)[0].objective_ms), change.what


def test_the_next_best_plan_of_two_encoders_runs_them_in_turn() -> None:
    next_best = explained(encoders()).next_best
    assert next_best.predicted_ms == pytest.approx(15)
    assert next_best.note == "image | text | head"


def test_a_chain_has_no_other_partition() -> None:
    explanation = explained(profile_of({"a": flat(1), "b": flat(1)}, num_slots=1, edges=[("a", "b")]))
    assert explanation.next_best.predicted_ms is None
    assert "no other partition fits" in changes_text(explanation)


class NotPairwise(NoInterference):
    is_zero = False
    is_pairwise = False


def test_what_the_exact_search_cannot_do_is_said() -> None:
    profile = encoders()
    cost = CostModel.from_profile(profile)
    plan = solve(profile.graph, cost, profile.device)
    cost.interference = NotPairwise()
    explanation = explain(plan, profile.graph, cost)
    assert explanation.changes == ()
    assert "NotPairwise is neither a sum over pairs" in changes_text(explanation)


def test_the_report_has_a_sentence_for_every_module() -> None:
    explanation = explained(encoders())
    assert explanation_table(explanation).row_count == 3
    texts = {reason.module: reason_text(reason) for reason in explanation.modules}
    assert texts["image"] == "not the slowest: 2 ms to spare"
    assert texts["text"].startswith("slowest of its stage in forward and backward; more slots would not")
    assert texts["head"].endswith("no earlier, since it waits for image, text")
    assert "this plan: 12.00 ms predicted, proven best of its kind" in changes_text(explanation)
    assert "the best plan with other stages: 15.00 ms, 25.0% more (image | text | head)" in changes_text(explanation)
