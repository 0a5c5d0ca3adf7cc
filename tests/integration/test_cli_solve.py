"""``mosaic solve`` as a user meets it: exit codes, the answer's file, the checker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mosaic.solver
from bench.solver.generate import Recipe, generate
from mosaic import artifact
from mosaic.cli.main import run
from mosaic.plan import Plan
from mosaic.solver.instances.instance import Instance

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


PLANNERS = ["megatron", "distmm", "distmm-waves", "spindle", "spindle-optimus"]


@pytest.mark.parametrize("method", PLANNERS)
def test_a_planner_to_compare_with_answers_with_a_plan_that_the_checker_accepts(file, tmp_path, capsys, method):
    answer = tmp_path / "answer.json"
    assert run(["solve", str(file), "--method", method, "--json", str(answer)]) == 0
    found = json.loads(answer.read_text())
    assert (found["method"], found["status"], found["bound_ms"]) == (method, "feasible", None)
    capsys.readouterr()
    assert run(["solve", str(file), "--check", str(answer)]) == 0
    assert f"{found['objective_ms']:.6f} ms" in capsys.readouterr().out


def test_planning_starts_from_the_answer_for_an_earlier_instance(tmp_path, capsys):
    path, earlier = tmp_path / "instance.json", tmp_path / "earlier.json"
    made = generate(Recipe(shape="align", num_modules=14, num_devices=8, seed=0))
    artifact.save(made, path)

    def solved(*more: str) -> dict:
        capsys.readouterr()
        assert run(["solve", str(path), "--json", "-", *more]) == 0
        return json.loads(capsys.readouterr().out)

    earlier.write_text(json.dumps(solved("--time-limit", "30")))
    best_ms = json.loads(earlier.read_text())["objective_ms"]
    assert solved("--method", "heuristic")["objective_ms"] > best_ms
    assert solved("--method", "heuristic", "--from", str(earlier))["objective_ms"] == pytest.approx(best_ms)

    def change(raw):  # a module goes, one comes, and half of the devices are left
        raw["modules"][3]["name"] = "new"
        raw["num_devices"] = 4

    changed(path, change)
    placed = {p["module"] for stage in solved("--from", str(earlier))["plan"]["stages"] for p in stage["placements"]}
    assert placed == {module.name for module in made.modules} - {made.modules[3].name} | {"new"}


def test_a_method_that_cannot_start_from_a_plan_says_so(file, tmp_path, capsys):
    answer = tmp_path / "answer.json"
    run(["solve", str(file), "--json", str(answer)])
    assert run(["solve", str(file), "--method", "gahc", "--from", str(answer)]) == 1
    assert "does not start from an earlier plan" in capsys.readouterr().err


def test_granularity_and_ablations_of_algorithm_1_can_be_chosen(file, tmp_path, capsys):
    def solved(*more: str) -> dict:
        capsys.readouterr()
        assert run(["solve", str(file), "--method", "gahc", "--json", "-", *more]) == 0
        return json.loads(capsys.readouterr().out)

    every = solved()
    plain = solved("--no-prune", "--no-cache")
    assert plain["plan"]["stages"] == every["plan"]["stages"]
    assert plain["plan"]["search"]["num_pruned"] == plain["plan"]["search"]["num_cache_hits"] == 0
    assert every["plan"]["search"]["num_pruned"] + every["plan"]["search"]["num_cache_hits"] > 0
    coarse = solved("--granularity", "30")
    quotas = {len(one["slots"]) for stage in coarse["plan"]["stages"] for one in stage["placements"]}
    assert quotas <= {3, 6, 9, 10}
    assert run(["solve", str(file), "--granularity", "30"]) == 1  # a bound would not be one of the instance
    assert run(["solve", str(file), "--method", "gahc", "--granularity", "0"]) == 1
    assert "granularity=0.0" in capsys.readouterr().err


def test_planners_side_by_side_and_an_explanation_are_shown_on_request(file, capsys):
    assert run(["solve", str(file), "--compare", "--explain"]) == 0
    shown = capsys.readouterr().out
    for said in (
        *PLANNERS,
        "sequential",
        "gahc",
        "exact",
        "one more slot on each device",
        "one more device",
        "slowest",
    ):
        assert said in shown


def test_the_answer_does_not_replace_the_instance_and_a_folder_is_refused_before_the_search(file, tmp_path, capsys):
    before = file.read_text()
    assert run(["solve", str(file), "--json", str(file)]) == 1
    assert "name another file" in capsys.readouterr().err
    assert file.read_text() == before
    assert run(["solve", str(file), "--json", str(tmp_path)]) == 1
    assert "optimal" not in capsys.readouterr().out


def test_a_file_that_is_neither_plan_nor_answer_is_not_checked(file, capsys):
    assert run(["solve", str(file), "--check", str(file)]) == 1
    assert "neither a plan nor an answer" in capsys.readouterr().err


def test_what_the_format_s_description_shows_can_be_run_as_it_is(tmp_path, monkeypatch):
    text = Path(mosaic.solver.__file__).with_name("README.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("instance.json").write_text(re.search(r"```json\n(.*?)```", text, re.DOTALL).group(1))
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1), {})
    commands = re.search(r"```sh\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    assert len(commands) == 5
    for file in ("instance.json", "star.json"):
        for command in commands:
            arguments = command.split("#")[0].split()[1:]
            with_names = {"FILE": file, "ANSWER": "answer.json", "PLAN": "answer.json"}
            assert run([with_names.get(one, one) for one in arguments]) == 0, command


def test_an_interrupted_search_ends_at_once_and_leaves_nothing_behind(tmp_path):
    path, answer = tmp_path / "large.json", tmp_path / "out" / "answer.json"
    artifact.save(generate(Recipe(shape="multi", num_modules=64, num_devices=32)), path)
    arguments = ["solve", str(path), "--time-limit", "3600", "--json", str(answer)]
    code = (  # as Ctrl-C does, a second from now
        "import signal, sys; from mosaic.cli.main import run; "
        "signal.signal(signal.SIGALRM, signal.default_int_handler); signal.setitimer(signal.ITIMER_REAL, 1.0); "
        f"sys.exit(run({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr
    assert [one.name for one in tmp_path.rglob("*") if one.is_file()] == ["large.json"]


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
    monkeypatch.setattr("mosaic.solver.memory.options.ALONE_NODES", 1)

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
