"""``mosaic retrain simulate``: past days, judged again by another gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Node

from bench.retrain.small_folder import write_day, write_recipe
from mosaic.cli.main import run

FIRST, SECOND, THIRD = "2026-11-20", "2026-11-21", "2026-11-22"


def test_past_days_are_judged_by_todays_gate_and_nothing_is_written(
    make_node: Callable[..., Node], capsys: pytest.CaptureFixture[str]
):
    node = make_node()
    root = str(node.folder.path)
    assert run(["retrain", "simulate", root]) == 1
    assert "there are none yet" in " ".join(capsys.readouterr().err.split())
    for day in (SECOND, THIRD):
        assert node.run() == 0
        write_day(node.folder.path, day, num_rows=120 if day == SECOND else 0)
    assert node.run() == 1  # the third day has no rows

    def simulated(*arguments: str) -> dict[str, list[str]]:
        assert run(["retrain", "simulate", root, *arguments]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {row[0]: row[1:] for row in rows if row and row[0].startswith("2026")}

    before = {path: path.stat().st_mtime_ns for path in node.folder.path.rglob("*")}
    same = simulated()
    assert [same[FIRST][:3], same[SECOND][:3]] == [["0001", "promoted", "promote"], ["0002", "promoted", "promote"]]
    assert same[THIRD][:3] == ["failed", "no", "row"]
    assert {path: path.stat().st_mtime_ns for path in node.folder.path.rglob("*")} == before
    write_recipe(node.folder.path, gate={"min_value": 1.1})
    strict = simulated("--last", "2")
    assert list(strict) == [SECOND, THIRD]
    assert strict[SECOND][:6] == ["0002", "promoted", "refuse", "The", "mean", "value"]
    assert run(["retrain", "simulate", root, "--last", "0"]) == 2

    node.folder.day(FIRST).scores.unlink()
    assert run(["retrain", "simulate", root]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert f"{FIRST}/scores.json is gone" in message.replace("\n", "")
    assert "fewer days by --last" in message
    assert simulated("--last", "2") == strict
