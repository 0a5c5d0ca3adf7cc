"""The sweep: a model in chunks, and an operator; each case has a kept outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import pages, tables
from bench.sweep.__main__ import run_alone
from bench.sweep.catalogue import all_cases, pipeline_cases
from bench.sweep.parted import judge_parted
from bench.sweep.tables import EQUAL, ON_LANES, PIPELINE_STUDY, STUDY


@pytest.mark.parametrize(("study", "cases"), [(STUDY, all_cases), (PIPELINE_STUDY, pipeline_cases)])
def test_every_case_has_an_outcome_in_the_kept_results(study: str, cases: Callable[[], list[Any]]):
    kept = pages.newest_study(study, tables.RESULTS)
    assert kept is not None
    assert {case.name for case in cases()} <= {figure.labels["case"] for figure in kept.figures}


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks a process whose autograd may have threads of the GPU")
def test_a_model_is_equal_in_chunks():
    (case,) = [case for case in pipeline_cases() if case.name == "clip"]
    assert run_alone(case, judge_parted).labels["outcome"] == EQUAL


def test_an_operator_between_modules_is_equal_on_lanes():
    pytest.importorskip("expecttest", reason="torch's database of operators needs it")
    from bench.sweep.operators import judge_operator, operator_cases

    (case,) = [case for case in operator_cases() if case.name == "mul"]
    assert run_alone(case, judge_operator).labels["outcome"] == ON_LANES
