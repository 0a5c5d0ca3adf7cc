"""One table of methods: a method that is added to it is offered everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from planning_cases import flat, linear, profile_of

import mosaic
from mosaic.artifact import load, save
from mosaic.cost import CostModel
from mosaic.plan import Plan, SearchRecord
from mosaic.solver import METHODS, solve
from mosaic.solver.compare import compare
from mosaic.solver.methods import Method, compared_methods, describe_methods, method_of
from mosaic.solver.planners.draft import DraftWave, Sheet, whole_job
from mosaic.solver.planners.waves import plan_waves
from mosaic.solver.runnable import check_method, plan_to_run
from mosaic.solver.searches import find_in_turn
from mosaic.solver.task import Found, Task

PROFILE = profile_of({"a": linear(8), "b": flat(3)}, num_slots=2, degrees=(1, 2), edges=["ab"])


def planned(method: str):
    return solve(PROFILE.graph, CostModel.from_profile(PROFILE), PROFILE.device, num_devices=2, method=method)


def mine(task: Task) -> Found:
    """What a file with a solver of one's own holds."""
    return replace(find_in_turn(task), record=SearchRecord(method=task.method))


def narrow(sheet: Sheet) -> Iterator[list[DraftWave]]:
    """What a file with a planner of one's own holds: every module in turn, on as few devices as it can have."""
    yield [(whole_job(name, sheet.widths[name][0]),) for name in sheet.graph.topological_order()]


@pytest.fixture
def with_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", Method(name="mine", phrase="a solver of one's own", find=mine))
    planner = Method(name="narrow", phrase="a planner of one's own", find=lambda task: plan_waves(task, narrow))
    monkeypatch.setitem(METHODS, "narrow", planner)


@pytest.mark.usefixtures("with_mine")
def test_a_method_that_is_added_is_solved_run_compared_and_described() -> None:
    assert planned("mine").search.method == "mine"
    assert [placed.degree for placed in planned("narrow").placements] == [1, 1]
    cost = CostModel.from_profile(PROFILE)
    assert plan_to_run("mine", PROFILE.graph, cost, PROFILE.device, num_devices=2).search.method == "mine"
    check_method("mine")
    rows = compare(PROFILE.graph, cost, PROFILE.device, num_devices=2)
    assert {"mine", "narrow"} < {row.method for row in rows if row.predicted_ms}
    assert compared_methods()[-2:] == ("mine", "narrow")
    assert "mine (a solver of one's own)" in describe_methods()


def test_a_name_that_is_not_in_the_table_is_refused_with_all_that_are() -> None:
    with pytest.raises(ValueError, match="unknown method 'mine'; choose one of: auto, sequential, megatron"):
        planned("mine")
    assert all(method_of(name).name == name for name in METHODS)
    assert [name for name, method in METHODS.items() if method.gives_bound] == ["auto", "exact", "brute_force"]
    assert [name for name, method in METHODS.items() if method.slices] == ["spindle"]


MINE = '''"""A solver of one's own."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mosaic.plan import Plan, SearchRecord
from mosaic.solver.searches import find_in_turn
from mosaic.solver.task import Found, Task


def find(task: Task) -> Found:
    """Plans as sequential does, under another name."""
    return replace(find_in_turn(task), record=SearchRecord(method=task.method))
'''
LINE = """    Method(name="mine", phrase="a solver of one's own", find=mine.find),
"""


def test_in_a_copy_of_the_package_one_file_and_one_line_add_a_solver(tmp_path: Path) -> None:
    copy = tmp_path / "mosaic"
    shutil.copytree(Path(mosaic.__file__).parent, copy, ignore=shutil.ignore_patterns("profiler", "__pycache__"))
    (copy / "solver" / "mine.py").write_text(MINE)
    table = copy / "solver" / "methods.py"
    imported = "from mosaic.solver.planners import"
    text = table.read_text().replace(imported, f"from mosaic.solver import mine\n{imported}")
    table.write_text(text.replace("_ALL = (\n", "_ALL = (\n" + LINE))
    save(PROFILE, tmp_path / "profile.json")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from mosaic.__main__ import main; main()", "plan", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run("profile.json", "--gpus", "2", "--method", "mine", "--compare")
    assert load(Plan, tmp_path / "plan.json").search.method == "mine"
    assert [line for line in shown.splitlines() if "mine" in line.split()[:2]], shown
    assert "mine (a solver of one's own)" in " ".join(run("--help").replace("│", " ").split())
