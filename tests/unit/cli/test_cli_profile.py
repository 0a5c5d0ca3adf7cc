"""``mosaic profile``: its options, what it says and what it leaves."""

from __future__ import annotations

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
    more = ["--degrees", "1", "2", "8", "--cluster", "h200", "--quotas", "1", "2"]
    assert run([*arguments, *more]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    first = load(Profile, tmp_path / "profile.json")
    assert {sample.degree for sample in first.samples} == {1, 2, 8}
    assert f"{len(first.samples)} samples" in printed
    assert "left cannot run at 1, 2 slots of each of 8 devices: 'left' has a batch of 6, less" in printed
    assert first.structures
    assert run([*arguments, *more]) == 0
    assert load(Profile, tmp_path / "profile.json").samples == first.samples
    assert run([*arguments, *more, "--fresh"]) == 0
    assert load(Profile, tmp_path / "profile.json").samples != first.samples


def test_several_processes_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(arguments) == 2
    assert "start it without torchrun" in capsys.readouterr().err
