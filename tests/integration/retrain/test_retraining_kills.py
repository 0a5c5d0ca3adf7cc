"""Days that are killed end as if nobody had disturbed them; promotions that are killed are made once."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_script


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_script("retraining_kills.py", "chain", str(tmp_path_factory.mktemp("chain")))[1]


@pytest.fixture(scope="module")
def promotions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_script("retraining_kills.py", "promotion", str(tmp_path_factory.mktemp("promotion")))[1]


def test_kills_of_whoever_runs_leave_the_bits_of_an_undisturbed_run(days: list[dict[str, Any]]):
    kills = [kill for day in days for kill in day["kills"]]
    assert len(kills) >= 6
    assert len({kill["target"] for kill in kills}) >= 3
    for day in days:
        assert not day["differs"], day
        assert day["again_differently"] == 0
        assert day["outcome"] == "promoted"


def test_no_process_outlives_the_one_that_started_it(days: list[dict[str, Any]]):
    assert [kill for day in days for kill in day["kills"] if kill["left"]] == []


def test_the_report_names_the_causes_of_restarts_and_says_that_the_bits_are_the_same(days: list[dict[str, Any]]):
    assert any(start["ended"] != "done" for day in days for start in day["report"]["state"]["starts"])
    assert all(day["report"]["trained"]["notes"]["differs_from_step"] is None for day in days)


def test_a_promotion_killed_on_its_way_is_made_by_the_next_run(promotions: list[dict[str, Any]]):
    assert len(promotions) >= 4
    assert promotions[-1]["ended"] == 0
    for found in promotions:
        assert found["seen"] in ("0001", "0002"), found
        assert (found["again"], found["outcome"], found["champion"]) == (0, "promoted", "0002"), found
        assert found["told"][0] == "0001", found
        assert set(found["told"]) == {"0001", "0002"}, found
        assert found["versions"] == ["0001", "0002"], found
        assert found["earlier"][0] is None, found
        assert set(found["earlier"][1:]) == {"0001"}, found
        assert found["left"] == [], found
        assert found["page"], found


def test_a_rollback_after_a_killed_promotion_stands(promotions: list[dict[str, Any]]):
    rolled_back = [found["after_back"] for found in promotions if "after_back" in found]
    assert rolled_back
    assert set(rolled_back) == {"0001"}
