"""``mosaic solve`` as a user meets it: exit codes, the answer's file, the checker."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from mosaic import artifact
from mosaic.cli.main import run
from mosaic.plan import Plan
from mosaic.solver.generate import Recipe, generate
from mosaic.solver.instance import Instance

MADE = generate(Recipe(shape="layered", num_modules=6, num_devices=4, seed=1))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "instance.json"
    artifact.save(MADE, path)
    return path


def changed(path, change) -> str:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return str(path)


def test_the_answer_has_status_objective_bound_and_plan(file, tmp_path, capsys):
    answer = tmp_path / "answer.json"
    assert run(["solve", str(file), "--method", "exact", "--time-limit", "30", "--json", str(answer)]) == 0
    found = json.loads(answer.read_text())
    assert found["status"] == "optimal"
    assert found["bound_ms"] == pytest.approx(found["objective_ms"], rel=1e-9)
    assert sum(len(stage["placements"]) for stage in found["plan"]["stages"]) == 6
    assert "optimal" in capsys.readouterr().out
    assert run(["solve", str(file), "--check", str(answer)]) == 0
    assert "keeps every rule" in capsys.readouterr().out


def test_json_to_standard_output_is_nothing_but_json(file, capsys):
    assert run(["solve", str(file), "--method", "sequential", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "feasible"


def test_a_time_limit_of_zero_answers_with_the_sequential_plan(file, capsys):
    assert run(["solve", str(file), "--time-limit", "0", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plan"]["stages"]) == 6


def test_a_plan_of_its_own_can_be_checked_and_a_broken_one_is_refused(file, tmp_path, capsys):
    answer = tmp_path / "answer.json"
    run(["solve", str(file), "--json", str(answer)])
    plan = artifact.parse(Plan, json.dumps(json.loads(answer.read_text())["plan"]), source="answer")
    path = tmp_path / "plan.json"
    artifact.save(plan, path)
    assert run(["solve", str(file), "--check", str(path)]) == 0
    changed(path, lambda raw: raw["stages"].pop())
    capsys.readouterr()
    assert run(["solve", str(file), "--check", str(path)]) == 1
    assert "is not placed" in capsys.readouterr().err


def test_no_plan_is_exit_code_3_with_the_reasons_in_the_file_and_on_the_screen(file, tmp_path, capsys):
    answer = tmp_path / "answer.json"
    path = changed(file, lambda raw: raw.update(memory_bytes=1000))
    assert run(["solve", path, "--json", str(answer)]) == 3
    found = json.loads(answer.read_text())
    assert (found["status"], found["plan"], found["objective_ms"]) == ("infeasible", None, None)
    assert len(found["reasons"]) == 6
    assert "needs" in found["reasons"][0]
    assert MADE.modules[0].name in capsys.readouterr().err
    assert run(["solve", str(file), "--check", str(answer)]) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.update(num_devices=0), "at least one device"),
        (lambda raw: raw["modules"][0].update(options=[]), "has no options"),
        (lambda raw: raw["modules"][0]["options"][0].update(forward_ms=-1), "not negative"),
        (lambda raw: [m.update(after=[raw["modules"][i - 1]["name"]]) for i, m in enumerate(raw["modules"])], "cycle"),
        (lambda raw: raw.update(schema_version=9), "newer"),
        (lambda raw: raw.update(modules=[]), "at least one module"),
    ],
)
def test_a_bad_file_is_exit_code_1_and_says_why(file, capsys, change, says):
    assert run(["solve", changed(file, change)]) == 1
    assert re.search(says, capsys.readouterr().err)


def test_contradictory_pins_are_exit_code_3(file, capsys):
    def contradict(raw):
        raw["modules"][2]["options"] = [o for o in raw["modules"][2]["options"] if o["degree"] < 4 or o["quota"] == 10]
        raw["modules"][2]["pin"] = {"degrees": [4], "quotas": [3]}

    assert run(["solve", changed(file, contradict)]) == 3
    assert "is pinned to degrees [4] and quotas [3]" in capsys.readouterr().err


def test_solving_an_instance_loads_neither_torch_nor_ortools(file):
    code = (
        "import sys; from mosaic.cli.main import run; "
        f"assert run(['solve', {str(file)!r}]) == 0; "
        "assert 'torch' not in sys.modules and 'ortools' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_instance_is_loaded_as_it_was_written(file):
    assert artifact.load(Instance, file) == MADE
