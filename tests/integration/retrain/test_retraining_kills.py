"""Killed days end like undisturbed days; promotions that are killed are made once."""

from __future__ import annotations

from pathlib import Path

from conftest import run_script


def test_kills_of_any_process_leave_the_bits_of_an_undisturbed_run(tmp_path: Path):
    days = run_script("retraining_kills.py", "chain", str(tmp_path))[1]
    kills = [kill for day in days for kill in day["kills"]]
    assert len(kills) >= 6
    assert len({kill["target"] for kill in kills}) >= 3
    assert [kill for kill in kills if kill["left"]] == [], "a process outlived the one that started it"
    for day in days:
        assert (day["differs"], day["again_differently"], day["outcome"]) == ([], 0, "promoted")
        assert day["report"]["trained"]["notes"]["differs_from_step"] is None
    assert any(start["ended"] != "done" for day in days for start in day["report"]["state"]["starts"])


def test_a_promotion_killed_on_its_way_is_made_once_and_a_rollback_after_it_stands(tmp_path: Path):
    promotions = run_script("retraining_kills.py", "promotion", str(tmp_path))[1]
    assert len(promotions) >= 4
    assert promotions[-1]["ended"] == 0
    for each in promotions:
        assert each["seen"] in ("0001", "0002"), each
        assert (each["again"], each["outcome"], each["champion"]) == (0, "promoted", "0002"), each
        assert each["told"][0] == "0001", each
        assert set(each["told"]) == {"0001", "0002"}, each
        assert each["versions"] == ["0001", "0002"], each
        assert each["earlier"][0] is None, each
        assert set(each["earlier"][1:]) == {"0001"}, each
        assert (each["left"], each["page"]) == ([], True), each
    assert {each["after_back"] for each in promotions if "after_back" in each} == {"0001"}
