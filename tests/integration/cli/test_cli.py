"""The command line as a whole: its entry, its help, its JSON, and files that it finds before it works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from user_models import FILE

import mosaic
from mosaic import artifact
from mosaic.cli.main import run
from mosaic.plan import Plan


def test_python_m_mosaic_is_the_command_and_prints_its_version():
    answer = subprocess.run([sys.executable, "-m", "mosaic", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == f"mosaic {mosaic.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "doctor", "profile", "plan", "run", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        run([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_missing_and_unwritable_files_are_found_before_torch_is_loaded():
    lines = (
        "import os, sys; from mosaic.cli.main import run",
        "assert run(['profile', '--model', 'absent.py:make']) == 1",
        f"assert run(['run', '--model', {str(FILE)!r} + ':make', '--output', {str(Path(FILE) / 'below')!r}]) == 1",
        "assert 'torch' not in sys.modules",
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'",
    )
    answer = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    absent, unwritable = answer.stderr.splitlines()
    assert absent == "mosaic: absent.py does not exist; name a Python file"
    assert "cannot write" in unwritable


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--context", "2", "--tokens", "1024"], "imbalance"),
        (["--pipeline", "2", "--model", "zoo:qwen3-vl-tiny", "--seconds", "0.1"], "simulated_ms"),
    ],
)
def test_planned_pipelines_and_sequences_are_written_as_json_and_quiet_prints_nothing(
    arguments: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *arguments, "--json", "result.json", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result if isinstance(result, list) else result["rows"]
    assert all(key in row for row in rows)


def test_a_model_is_planned_for_absent_gpus_and_compared_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    output, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    arguments = ["plan", "--model", f"{FILE}:make", "--device", "h100-80g", "--gpus", "8", "--output", str(output)]
    assert run([*arguments, "--compare", "--picture", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    plan = artifact.load(Plan, output)
    assert (plan.num_devices, plan.device.num_slots) == (8, 16)
    printed = capsys.readouterr().out
    assert "waits for" in printed  # the last column, in a pipe, too
    words = ("nothing was measured", "counted in float32: the format", "predicted by one cost model")
    for word in (*words, "megatron", "distmm", "spindle", "gahc", "exact"):
        assert word in " ".join(printed.split())
    assert run([*arguments, "--json", "-"]) == 0
    assert artifact.parse(Plan, capsys.readouterr().out, source="stdout") == artifact.load(Plan, output)


def test_a_causal_mask_is_divided_beside_other_methods_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "mask.png"
    assert run(["plan", "--context", "4", "--tokens", "4096", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    for word in ("4096 tokens over 4 ranks", "headtail", "ring", "random", "counted, not measured"):
        assert word in printed


def test_a_mask_comes_from_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.py").write_text(
        "from mosaic.context import gemma\n"
        "def make():\n    return gemma([-1] * 600 + [0] * 300)\n"
        "def draw(tokens, seed):\n    return gemma([-1] * (tokens - seed) + [0] * seed)\n"
        "def wrong():\n    return 3\n"
    )
    assert run(["plan", "--context=2", "--mask", f"{tmp_path}/mine.py:make", "--method", "ring"]) == 0
    assert "900 tokens over 2 ranks" in capsys.readouterr().out
    assert run(["plan", "--context=2", "--mask", f"{tmp_path}/mine.py:draw", "--tokens=1000", "--seed=200"]) == 0
    assert "1000 tokens over 2 ranks" in capsys.readouterr().out
    assert run(["plan", "--context=2", "--mask", f"{tmp_path}/mine.py:wrong"]) == 1
    assert "returned int; return a mosaic.context.MaskWords" in capsys.readouterr().err
