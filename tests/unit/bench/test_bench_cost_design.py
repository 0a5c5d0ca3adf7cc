"""Few runs that tell the coefficients: chosen alike every time, better than runs by chance."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from planning_cases import device_of, sample

from bench.cost.fitting.design import GroupRun, _candidates, _rows, design_runs
from bench.cost.fitting.least_squares import condition_number
from mosaic.cost import Bandwidths
from mosaic.profile import Phase

MODULES = ("a", "b", "c", "d", "e")
DEVICE = device_of(16)
BANDWIDTHS = Bandwidths(
    replace(sample(q, 1.0, module=m, phase=phase), bandwidth_utilisation=min(1.0, (0.1 + 0.15 * i) * (0.4 + q / 20)))
    for i, m in enumerate(MODULES)
    for q in range(1, 17)
    for phase in Phase
)


def condition(runs: tuple[GroupRun, ...]) -> float:
    """Of the terms of all forms."""
    return condition_number(np.vstack(_rows(runs, BANDWIDTHS, MODULES, DEVICE.num_slots)))


def test_every_run_fits_on_the_device() -> None:
    for run in design_runs(MODULES, BANDWIDTHS, DEVICE, budget=12):
        assert len(run.modules) == len(run.quotas) == len(set(run.modules))
        assert all(quota >= 1 for quota in run.quotas)
        assert sum(run.quotas) <= DEVICE.num_slots


def test_the_same_question_has_the_same_answer_and_a_smaller_budget_is_its_beginning() -> None:
    runs = design_runs(MODULES, BANDWIDTHS, DEVICE, budget=9)
    assert runs == design_runs(MODULES, BANDWIDTHS, DEVICE, budget=9)
    assert runs[:4] == design_runs(MODULES, BANDWIDTHS, DEVICE, budget=4)
    assert len(set(runs)) == 9


def test_groups_of_every_size_are_in_it() -> None:
    runs = design_runs(MODULES, BANDWIDTHS, DEVICE, budget=6)
    assert {len(run.modules) for run in runs} == {2, 3, 4, 5}
    assert {len(run.modules) for run in design_runs(MODULES, BANDWIDTHS, device_of(2), budget=6)} == {2}


def test_eight_designed_runs_tell_the_coefficients_better_than_most_eight_by_chance() -> None:
    designed = condition(design_runs(MODULES, BANDWIDTHS, DEVICE, budget=8))
    candidates = list(_candidates(MODULES, DEVICE.num_slots, 5))
    by_chance = [condition(tuple(random.Random(seed).sample(candidates, 8))) for seed in range(50)]
    assert designed < sorted(by_chance)[10]


def test_there_are_no_more_runs_than_there_are_groups() -> None:
    assert design_runs("ab", BANDWIDTHS, device_of(2), budget=9) == (GroupRun(modules=("a", "b"), quotas=(1, 1)),)


def test_modules_that_use_no_bandwidth_still_make_a_design() -> None:
    idle = Bandwidths([], idle=[(m, phase) for m in MODULES for phase in Phase])
    assert len(design_runs(MODULES, idle, DEVICE, budget=5)) == 5


@pytest.mark.parametrize(
    ("modules", "num_slots", "budget", "most"), [("ab", 16, 0, 4), ("a", 16, 3, 4), ("ab", 1, 3, 4), ("ab", 16, 3, 1)]
)
def test_nothing_to_run_side_by_side_is_refused(modules: str, num_slots: int, budget: int, most: int) -> None:
    with pytest.raises(ValueError, match="a budget of one or more, and two modules and slots"):
        design_runs(modules, BANDWIDTHS, device_of(num_slots), budget=budget, max_modules=most)
