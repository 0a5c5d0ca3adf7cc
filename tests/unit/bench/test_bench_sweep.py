"""The sweep over models, nets and loops: each way in which a case can end, and what the tables say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sweep.__main__ import run_alone
from bench.sweep.catalogue import all_cases, pipeline_cases
from bench.sweep.outcomes import (
    EQUAL,
    ON_LANES,
)
from bench.sweep.parted import judge_parted


@pytest.mark.parametrize("name", ["clip", "several_losses_summed"])
def test_cases_of_the_list_are_equal_on_lanes(name):
    (case,) = [case for case in all_cases() if case.name == name]
    assert run_alone(case).labels["outcome"] == ON_LANES


@pytest.mark.parametrize("name", ["clip", "hook_keeps_a_feature_for_the_loss"])
def test_cases_of_the_list_are_equal_in_chunks(name):
    (case,) = [case for case in pipeline_cases() if case.name == name]
    assert run_alone(case, judge_parted).labels["outcome"] == EQUAL


def test_an_operator_between_modules_is_equal_on_lanes_and_a_file_is_continued(tmp_path: Path):
    pytest.importorskip("expecttest", reason="torch's database of operators needs it")
    from bench.sweep.operators import sweep

    path = tmp_path / "operators.json"
    (first,) = sweep(["mul"], path=path).figures
    assert first.labels["outcome"] == ON_LANES
    assert [figure.labels["operator"] for figure in sweep(["mul", "svd"], path=path).figures] == ["mul", "svd"]
