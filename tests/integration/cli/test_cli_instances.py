"""``mosaic plan INSTANCE`` as a user meets it: exit codes, the plan's file, the checker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.solver.generate import Recipe, generate
from mosaic import artifact
from mosaic.cli.main import run
from mosaic.plan import Plan
from mosaic.solver.instance import Instance

INSTANCE = generate(Recipe(shape="layered", num_modules=6, num_devices=4, seed=1))
PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where plan.json is left
    path = tmp_path / "instance.json"
    artifact.save(INSTANCE, path)
    return path


def changed(path: Path, change: Callable[[Any], Any]) -> str:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return str(path)


def test_a_plan_of_an_instance_is_proven(file, capsys):
    assert run(["plan", str(file), "--method", "exact", "--time-limit", "30"]) == 0
    plan = artifact.load(Plan, Path("plan.json"))
    assert plan.search.status == "optimal"
    assert plan.search.bound_ms == pytest.approx(plan.predicted_ms, rel=1e-9)
    assert len(plan.placements) == 6
    printed = " ".join(capsys.readouterr().out.split())
    assert "proven" in printed
    assert run(["plan", str(file), "--explain-gain"]) == 2
    assert "has only times: pass --model" in " ".join(capsys.readouterr().err.split())


def test_no_plan_is_exit_code_3_with_the_reasons_and_no_file(file, capsys):
    assert run(["plan", changed(file, lambda raw: raw.update(memory_bytes=1000))]) == 3
    printed = capsys.readouterr().err
    assert all(f"{module.name!r} needs" in printed for module in INSTANCE.modules)
    assert not Path("plan.json").exists()


def test_a_reader_that_closes_its_pipe_loses_no_file(file):
    code = f"from mosaic.cli.main import run; raise SystemExit(run(['plan', {str(file)!r}, '--picture', 'plan.svg']))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    _, printed = child.communicate(timeout=60)
    assert (child.returncode, printed) == (0, b"")
    assert Path("plan.svg").is_file()


@pytest.mark.parametrize("field", ["num_devices", "num_slots"])
def test_a_machine_that_no_search_can_hold_is_refused(file, field, capsys):
    assert run(["plan", changed(file, lambda raw: raw.update({field: 10**9}))]) == 1
    assert f"{field}: Input should be less than or equal to" in " ".join(capsys.readouterr().err.split())


def test_the_plan_does_not_replace_the_instance_and_a_folder_is_refused_before_the_search(file, tmp_path, capsys):
    before = file.read_text()
    for option in ("--json", "--output"):
        assert run(["plan", str(file), option, str(file)]) == 2
        assert "name another file" in capsys.readouterr().err
        assert run(["plan", str(file), option, str(tmp_path)]) == 2
        assert "proven" not in capsys.readouterr().out
    assert file.read_text() == before


def test_what_the_page_about_planning_shows_can_be_run_as_it_is(tmp_path, monkeypatch):
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("instance.json").write_text(re.search(r"```json\n(.*?)```", text, re.DOTALL).group(1))
    commands = re.search(r"```sh\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    mine = [line.split("#")[0].split()[1:] for line in commands if "--model" not in line and "profile.json" not in line]
    assert len(mine) == 1
    assert run(mine[0]) == 0


def test_an_interrupted_search_ends_at_once_and_leaves_the_best_plan_so_far(tmp_path):
    path, plan = tmp_path / "large.json", tmp_path / "out" / "plan.json"
    artifact.save(generate(Recipe(shape="align", num_modules=16, num_devices=32)), path)
    arguments = ["plan", str(path), "--time-limit", "3600", "--output", str(plan)]
    code = (  # Ctrl-C as soon as the search runs: in the middle of one of its questions
        "import os, signal, sys; from mosaic.cli.main import run; "
        "import mosaic.solver.solve; module = sys.modules['mosaic.solver.solve']; "
        "begin = module.all_options; interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT); "
        "signal.signal(signal.SIGALRM, interrupt); "
        "module.all_options = lambda *a, **k: (signal.setitimer(signal.ITIMER_REAL, 0.5), begin(*a, **k))[1]; "
        f"sys.exit(run({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "stopped" in done.stderr
    assert "has the best plan so far" in " ".join(done.stderr.split())
    assert [entry.name for entry in plan.parent.iterdir()] == ["plan.json"]
    artifact.load(Plan, plan).check_covers(artifact.load(Instance, path).graph)
