"""The command line as a whole: its entry, its switches, its exit codes, and files that it finds before it works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mosaic
from mosaic.__main__ import main
from mosaic.cli.main import run

MODEL = """
import torch
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, image, text):
        return self.image(image) + self.text(text)

def narrow():
    return Towers(), {"image": torch.randn(4, 7), "text": torch.randn(4, 8)}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "towers.py"
    path.write_text(MODEL)
    return path


def test_python_m_mosaic_is_the_command_and_says_its_version():
    answer = subprocess.run([sys.executable, "-m", "mosaic", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == f"mosaic {mosaic.__version__}\n"


def test_an_interrupt_during_imports_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mosaic.cli.main", Interrupted())
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "mosaic: interrupted\n"


def test_a_sample_that_the_model_does_not_accept_is_a_message(model: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["profile", "--model", f"{model}:narrow", "--output", str(model.parent / "profile.json")]) == 2
    message = capsys.readouterr().err
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert "pass one batch that the model accepts" in message


def test_missing_and_unwritable_files_are_found_before_torch_is_loaded(model: Path):
    lines = (
        "import os, sys; from mosaic.cli.main import run",
        f"assert run(['profile', '--model', {str(model.with_name('absent.py'))!r} + ':make']) == 1",
        f"assert run(['run', '--model', {str(model)!r} + ':make', '--output', {str(model / 'below')!r}]) == 1",
        "assert 'torch' not in sys.modules",
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'",
    )
    answer = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    absent, unwritable = answer.stderr.splitlines()
    assert absent == f"mosaic: there is no file {model.with_name('absent.py')}"
    assert "cannot write" in unwritable


def test_a_folder_that_can_be_made_is_not_made_before_there_is_a_result(tmp_path: Path):
    assert run(["plan", "absent.json", "--output", str(tmp_path / "new" / "folder" / "plan.json")]) == 1
    assert list(tmp_path.iterdir()) == []


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
