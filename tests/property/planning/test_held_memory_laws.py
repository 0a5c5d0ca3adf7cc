"""Memory held across stages, against brute force on random small instances, and laws that hold at any size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances, solve_instance

from mosaic.solver.held_memory import find_devices, fits
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine, StageResult

HELD = instances(4, is_held=True)


@bounded(40)
@given(instance=HELD)
def test_exact_agrees_with_brute_force_where_devices_hold_what_modules_keep(instance):
    truth = solve_instance(instance, method="brute_force")
    exact = solve_instance(instance, time_limit=60)
    assert exact.status in (truth.status, "feasible")  # the search may end without a proof
    assert bool(exact.reasons) == (exact.status == "infeasible")
    if exact.status == "optimal":
        assert exact.objective_ms == pytest.approx(truth.objective_ms, abs=ROUNDING_MS)
    if exact.status != "infeasible":
        assert truth.status == "optimal"
        assert exact.objective_ms >= truth.objective_ms - ROUNDING_MS


@bounded(40)
@given(instance=HELD, seconds=st.sampled_from([0.0, 0.01]))
def test_every_method_answers_within_memory_or_says_that_there_is_no_plan(instance, seconds):
    exact = solve_instance(instance, time_limit=60)
    for method in ("sequential", "gahc", "exact"):
        other = solve_instance(instance, method=method, time_limit=seconds)
        assert (other.status == "infeasible") == (exact.status == "infeasible")
        if other.plan is not None:
            assert other.objective_ms >= exact.objective_ms - ROUNDING_MS
            assert other.bound_ms <= exact.objective_ms + ROUNDING_MS


OPTIONS = st.builds(
    lambda degree, quota, resident, working: DeploymentOption(
        degree=degree, quota=quota, forward_ns=1, backward_ns=1, memory_bytes=resident + working, kept_bytes=resident
    ),
    *(st.integers(1, 3), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)),
)


@bounded(100)
@given(
    tables=st.lists(st.tuples(st.integers(0, 2), st.lists(OPTIONS, min_size=1, max_size=2)), min_size=1, max_size=4),
    memory_bytes=st.integers(3, 16),
)
def test_devices_are_found_just_where_some_choice_of_them_holds_everything(tables, memory_bytes):
    machine = Machine(num_devices=3, num_slots=4, memory_bytes=memory_bytes)
    options = {str(number): own for number, (_, own) in enumerate(tables)}
    partition = [[str(n) for n, (stage, _) in enumerate(tables) if stage == own] for own in range(3)]
    partition = [names for names in partition if names]

    def holds(chosen) -> bool:
        by_name = dict(zip(options, chosen, strict=True))
        stages = [StageResult(latency_ns=0, choices={n: by_name[n] for n in names}) for names in partition]
        held = ((stage, device) for stage in stages for device in range(3))
        return fits(stages, machine) and all(
            sum(option.quota for option, devices in stage.choices.values() if device in devices) <= 4
            for stage, device in held
        )

    ways = [[(o, on) for o in own for on in itertools.combinations(range(3), o.degree)] for own in options.values()]
    answer = find_devices(options, partition, machine)
    exists = any(map(holds, itertools.product(*ways)))
    assert (answer.stages is not None) == exists or not answer.is_closed
    if answer.stages is not None:
        assert holds([next(s.choices[name] for s in answer.stages if name in s.choices) for name in options])
