"""Stories: what the command line does without a line of the user's Python beside the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mosaic


def test_a_model_is_profiled_planned_and_run(mosaic_command: Callable[..., int], model_file: Path, tmp_path: Path):
    model, profile, plan = f"{model_file}:make", tmp_path / "profile.json", tmp_path / "plan.json"
    assert mosaic_command("profile", "--model", model, "--output", profile) == 0
    assert mosaic_command("plan", profile, "--output", plan) == 0
    assert isinstance(mosaic.load(profile), mosaic.Profile)
    assert {placed.module for placed in mosaic.load(plan).placements} == {"image", "text"}
    told = tmp_path / "told.json"
    words = ("--plan", plan, "--steps", 2, "--json", told, "--output", tmp_path / "run")
    assert mosaic_command("run", "--model", model, *words) == 0
    measured = json.loads(told.read_text())
    assert measured["step_ms_plain"] > 0
    assert measured["step_ms_colocated"] > 0
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]


def test_a_plan_for_32_h100s_needs_no_gpu(
    mosaic_command: Callable[..., int], model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "plan.json"
    words = ("--device", "h100-80g", "--gpus", 32, "--output", output)
    assert mosaic_command("plan", "--model", f"{model_file}:make", *words) == 0
    plan = mosaic.load(output)
    assert (plan.num_devices, plan.device.num_slots) == (32, 16)
    assert "nothing was measured" in " ".join(capsys.readouterr().out.split())


def test_how_modules_overlap_is_measured(mosaic_command: Callable[..., int], tmp_path: Path):
    words = ("--backend", "host", "--size", "tiny", "--output", tmp_path)
    assert mosaic_command("bench", "overlap", *words) == 0
    assert json.loads((tmp_path / "overlap.json").read_text())["times"]
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


def test_the_doctor_says_what_a_machine_and_a_model_have(
    mosaic_command: Callable[..., int], model_file: Path, capsys: pytest.CaptureFixture[str]
):
    assert mosaic_command("doctor", "--json", "-") == 0
    assert "torch" in json.loads(capsys.readouterr().out)
    assert mosaic_command("doctor", "--model", f"{model_file}:make") == 0
    printed = capsys.readouterr().out
    assert "image" in printed
    assert "text" in printed
