"""Which plan for all ranks runs, decided from given times; and which plans are tried at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from planning_cases import flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.plan import Plan
from mosaic.ranks.choosing.candidates import RANK_TRIAL, Candidates, data_parallel_plan, rank_plans_to_try
from mosaic.solver import solve
from mosaic.take_turns import Decision, Turns, Visit

NAMES = ("data-parallel", "exact", "distmm")


@dataclass
class Decided:
    """The end of a trial before the loop."""

    turns: Turns
    decision: Decision

    @property
    def winner(self) -> int:
        return self.decision.winner

    @property
    def reason(self) -> str:
        return self.decision.reason

    @property
    def sentences(self) -> tuple[str, ...]:
        return self.turns.report("", self.decision).sentences[1:]


def decided(names: Sequence[str], *times_ms: float | Callable[[bool], float], fail: Sequence[int] = ()) -> Decided:
    """Lets plans take turns: each has a time, or fails in its first turn."""
    turns = Turns(RANK_TRIAL, names, trains=False)
    num_visits = 0
    while isinstance(visit := turns.next_visit(), Visit):
        num_visits += 1
        assert num_visits < 30
        if visit.candidate in fail:
            turns.exclude(visit.candidate, "could not run: rank 1: no memory")
            continue
        for step in range(visit.num_steps):
            ms = times_ms[visit.candidate]
            turns.note(ms if isinstance(ms, float | int) else ms(step < visit.num_warm))
            if turns.is_cut:
                break
    return Decided(turns, visit)


def test_a_plan_that_is_faster_wins():
    found = decided(NAMES[:2], 10, 8)
    assert found.winner == 1
    assert found.reason == "exact is measured 1.25 times as fast as data-parallel"
    assert [one.median_ms for one in found.turns.candidates] == [10, 8]


def test_data_parallel_training_runs_where_a_plan_gains_less_than_noise():
    for slow in (11, 9.9, 10):
        found = decided(NAMES[:2], 10, slow)
        assert found.winner == 0
        assert "none is faster than data-parallel beyond the noise" in found.reason


def test_a_trial_ends_when_its_steps_have_taken_what_a_trial_may_take():
    for times in ((10, 9.9), (10, 14), (10, 40)):
        race = decided(NAMES[:2], *times).turns
        turns = race.num_steps / (RANK_TRIAL.steps_per_visit + RANK_TRIAL.warm_steps)
        assert race.took_ms < RANK_TRIAL.max_lost_steps * 10 + max(times) * (1 + turns), times
        assert race.num_steps <= RANK_TRIAL.max_steps
    assert decided(NAMES[:2], 10, 40).turns.num_steps < 10  # steps that are far slower end a turn


def test_of_three_plans_the_fastest_runs():
    found = decided(NAMES, 10, 5, 4)
    assert found.winner == 2
    assert found.turns.took_ms <= (RANK_TRIAL.max_lost_steps + 4) * 10


def test_slow_first_steps_of_turns_leave_time_for_the_turns_that_a_plan_needs_to_win():
    found = decided(NAMES[:2], lambda warm: 100 if warm else 10, lambda warm: 100 if warm else 8)
    assert found.winner == 1
    assert found.turns.took_ms == 10 * 100 + 10 * 10 + 10 * 8


def picked(gain: float, noise: float) -> int:
    """How many of two hundred trials end on the plan, where all steps of a turn share the machine's noise."""
    won = 0
    for seed in range(200):
        source, turns = random.Random(seed), [1.0]

        def took(warm: bool, ms: float, source: random.Random = source, turns: list[float] = turns) -> float:
            if warm:
                turns[0] = source.lognormvariate(0, noise)
            return ms * turns[0]

        won += decided(NAMES[:2], partial(took, ms=10), partial(took, ms=10 / gain)).winner
    return won


def test_a_plan_that_gains_nothing_is_seldom_picked_for_slow_moments_of_the_machine():
    assert picked(1.0, noise=0.4) <= 0.05 * 200
    assert picked(0.9, noise=0.4) <= 0.02 * 200


def test_a_plan_that_gains_a_quarter_is_nearly_always_picked_on_a_machine_that_is_quiet():
    assert picked(1.25, noise=0.05) >= 0.95 * 200


def test_a_plan_that_fails_loses_with_its_reason():
    found = decided(NAMES[:2], 10, 5, fail=[1])
    assert found.winner == 0
    assert found.sentences[1] == "tried exact: no step timed; could not run: rank 1: no memory"


def test_where_data_parallel_training_fails_the_next_plan_is_the_one_to_beat():
    found = decided(NAMES, 10, 5, 4, fail=[0])
    assert found.winner == 2
    assert found.reason == "distmm is measured 1.25 times as fast as exact"
    assert found.sentences[0].endswith("could not run: rank 1: no memory")
    alone = decided(NAMES[:2], 10, 5, fail=[0])
    assert (alone.winner, alone.reason) == (1, "exact is the only plan that is left")
    assert decided(NAMES, 10, 5, 4, fail=[0, 1]).winner == 2


# Which plans.


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


def test_a_third_plan_takes_part_if_there_is_time_for_its_turns():
    times = dict.fromkeys("abcd", flat(4))
    _, found = chosen(4, **times)
    assert len(found.plans) <= 3
    for plan in found.plans[1:]:
        assert plan.predicted_ms * RANK_TRIAL.smallest_gain <= found.plans[0].predicted_ms
    best, cost = found.plans[1], CostModel.from_profile(profile_of(times, num_slots=2, degrees=(1, 2, 4)))
    graph = profile_of(times, num_slots=2).graph
    slower = data_parallel_plan(graph, best.device, 4)  # of another layout than any that is planned here
    slower = replace(slower, stages=slower.stages[::-1], search=best.search)
    assert rank_plans_to_try(slower, graph, RANK_TRIAL, cost=cost).sentences == (
        "nothing is tried: the plan is data-parallel training",
    )
    short = replace(RANK_TRIAL, max_lost_steps=1)
    assert len(rank_plans_to_try(best, graph, short, cost=cost).plans) == 2


def test_data_parallel_training_predicts_nothing_at_a_degree_that_was_not_measured():
    profile = profile_of({"a": flat(4), "b": flat(4)}, num_slots=2, degrees=(1, 2))
    cost = CostModel.from_profile(profile)
    plain = data_parallel_plan(profile.graph, profile.device, 3, cost=cost)
    assert [placed.devices for placed in plain.placements] == [(0, 1, 2)] * 2
    assert plain.predicted_ms == 0
    best = solve(profile.graph, cost, profile.device, num_devices=3)
    assert rank_plans_to_try(best, profile.graph, RANK_TRIAL, cost=cost).plans == (plain, best)


def test_slots_that_are_reserved_are_so_in_data_parallel_training():
    profile = profile_of({"a": flat(4)}, num_slots=2)
    plain = data_parallel_plan(profile.graph, profile.device, 3, communication_slots=1)
    assert plain.placements[0].slots == (0,)
    assert (plain.communication_slots, plain.device) == (1, profile.device)
    with pytest.raises(ValueError, match="communication_slots=2"):
        data_parallel_plan(profile.graph, profile.device, 3, communication_slots=2)
