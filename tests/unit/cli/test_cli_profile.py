"""``mosaic profile``: its options, what it says and what it leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from user_models import FILE

from mosaic.artifact import load
from mosaic.cli.main import run
from mosaic.profile import Profile


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    folder = ["--output", str(tmp_path / "profile.json"), "--cache", str(tmp_path / "cache")]
    return ["profile", "--model", f"{FILE}:make_small", "--quotas", "1", *folder]


def test_degrees_and_a_cache(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = ["--degrees", "1,2,8", "--cluster", "h200", "--quotas", "1,2"]
    assert run([*arguments, *more]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    first = load(Profile, tmp_path / "profile.json")
    assert {sample.degree for sample in first.samples} == {1, 2, 8}
    assert f"{len(first.samples)} samples" in printed
    assert "left cannot run at 1, 2 slots of each of 8 devices: 'left' has a batch of 6, which is less" in printed
    assert first.structures
    assert run([*arguments, *more]) == 0
    assert load(Profile, tmp_path / "profile.json").samples == first.samples
    assert run([*arguments, *more, "--fresh"]) == 0
    assert load(Profile, tmp_path / "profile.json").samples != first.samples


def test_two_ranks_measure_their_links_and_the_first_one_the_modules(arguments: list[str], tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = tmp_path / "as_the_command.py"
    script.write_text("import sys\nfrom mosaic.cli.main import run\nsys.exit(run(sys.argv[1:]))\n")
    command += [str(script), *arguments, "--degrees", "2", "--backend", "host"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed.stderr
    assert " ".join(completed.stdout.split()).count("all-reduces over 2 ranks were measured:") == 1
    samples = load(Profile, tmp_path / "profile.json").samples
    backward = {(s.module, s.degree): s for s in samples if s.phase == "backward" and s.quota == 1}
    assert backward["left", 2].source == "composed"
