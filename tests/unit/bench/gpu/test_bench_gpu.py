"""``python -m bench.gpu`` as a whole: a rehearsal without a GPU, and what is left when things go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import tables
from bench.gpu import preflight
from bench.gpu.ladder import RUNGS
from bench.gpu.parts import MEASUREMENTS
from bench.record import Study
from mosaic.artifact import load

COMMAND = (sys.executable, "-m", "bench.gpu")
REHEARSED = (
    *RUNGS,
    *(
        name
        for name, measurement in MEASUREMENTS.items()
        if measurement.in_dry_run and (name == "models/clip/2" or not name.startswith(("models/", "tests/")))
    ),
)
"""The parts of a dry run, but for other models, which are the same code, and for tests, which are in this suite."""


def test_a_dry_run_takes_every_code_path_and_says_of_each_figure_that_it_is_one(tmp_path: Path):
    only = [word for name in REHEARSED for word in ("--only", name)]
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path), "--dry-run", "--no-build", *only],
        cwd=tables.TOP, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-dry-run.json")
    study = load(Study, path)
    assert study.dry_run
    assert study.machine is not None
    assert study.machine.kind == "host"
    assert study.figures
    assert all(figure.dry_run for figure in study.figures)
    assert all(figure.value is not None or figure.reason for figure in study.figures)
    assert [part.name for part in study.parts] == [*REHEARSED]
    went_wrong = {part.name: part.reason for part in study.parts if part.status not in ("done", "cut short")}
    assert not went_wrong
    assert {figure.part for figure in study.figures} == {*REHEARSED}
    assert all(part.verdict for part in study.parts if part.name in RUNGS)
    reasons = [figure.reason for figure in study.figures if figure.reason] + [part.verdict for part in study.parts]
    stale = ("TypeError", "AttributeError", "NameError", "ImportError", "KeyError")  # calls of what has changed since
    assert not [reason for reason in reasons if any(error in reason for error in stale)]
    text = path.with_suffix(".txt").read_text()
    assert "DRY RUN" in text
    (far,) = (f for f in study.of("models/clip/2", "loss_difference") if f.labels["variant"] == "mosaic")
    assert far.value is not None, "the whole path"
    assert far.value < 0.02, "and its answer is right"


@pytest.mark.skipif(preflight.why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_before_anything_else(tmp_path: Path):
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "out")], cwd=tables.TOP, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "no GPU" in done.stderr
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "out").exists()
