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


def test_a_module_that_fits_on_no_gpu_is_named_with_what_it_needs_and_what_there_is(file, capsys):
    def enlarge(raw):
        raw["memory_bytes"] = 90 * 10**9
        for option in raw["modules"][3]["options"]:
            option["memory_bytes"] = 123 * 10**9

    assert run(["solve", changed(file, enlarge)]) == 3
    said = capsys.readouterr().err
    assert f"{MADE.modules[3].name!r} needs 123,000,000,000 bytes" in said
    assert "90,000,000,000" in said
    assert MADE.modules[2].name not in said


def test_more_modules_than_bits_is_exit_code_1_and_says_how_many(file, capsys):
    def multiply(raw):
        first = raw["modules"][0]
        raw["modules"] = [{**first, "name": f"m{index}", "after": []} for index in range(65)]
        raw["disturbances"] = []

    assert run(["solve", changed(file, multiply)]) == 1
    assert "65 modules" in capsys.readouterr().err


def test_a_negative_time_limit_is_exit_code_1(file, capsys):
    assert run(["solve", str(file), "--time-limit", "-1"]) == 1
    assert "use 0 seconds or more" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["exact", "heuristic", "gahc", "sequential"])
def test_memory_that_no_machine_of_these_holds_is_exit_code_3_whatever_the_method(file, capsys, method):
    def keep(raw):
        raw["memory_bytes"] = 10
        for module in raw["modules"]:
            for option in module["options"]:
                option.update(memory_bytes=9, resident_bytes=6, activation_bytes=2)

    assert run(["solve", changed(file, keep), "--method", method]) == 3
    assert "what the 6 modules keep across stages" in capsys.readouterr().err


def test_what_is_not_decided_is_exit_code_1_and_not_infeasible(file, capsys, monkeypatch):
    monkeypatch.setattr("mosaic.solver.held_options.ALONE_NODES", 1)

    def keep(raw):
        raw["memory_bytes"] = 15
        for module in raw["modules"]:
            module["options"] = [option for option in module["options"] if option["degree"] == 1]
            for option in module["options"]:
                option.update(memory_bytes=8, resident_bytes=8)

    assert run(["solve", changed(file, keep)]) == 1
    assert "not proven that there is none" in capsys.readouterr().err


def test_a_device_with_slots_of_two_sms_is_planned_like_any_other(tmp_path, capsys):
    path = tmp_path / "fine.json"
    artifact.save(generate(Recipe(shape="star", num_modules=4, num_devices=2, num_slots=66)), path)
    assert run(["solve", str(path), "--time-limit", "60", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "optimal"
    assert found["plan"]["device"]["num_slots"] == 66
