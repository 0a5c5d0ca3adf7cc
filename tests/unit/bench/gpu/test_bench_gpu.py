"""``python -m bench.gpu`` as a whole: a rehearsal without a GPU, and what is left when things go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import tables
from bench.gpu import preflight
from bench.gpu.bench import Bench
from bench.gpu.child import Order, Outcome, Server
from bench.gpu.gpu_tests import run_tests
from bench.gpu.ladder import RUNGS
from bench.gpu.parts import MEASUREMENTS, Measurement
from bench.record import Figure, Study
from mosaic.artifact import load


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


REHEARSED = (
    *RUNGS,
    *(
        name
        for name, measurement in MEASUREMENTS.items()
        if measurement.in_dry_run and (not name.startswith("models/") or name == "models/clip/2")
    ),
)
"""What a dry run takes, but for models other than the simplest: these are the same code once more."""


def test_a_dry_run_takes_every_code_path_and_says_of_each_figure_that_it_is_one(tmp_path: Path):
    only = [word for name in REHEARSED for word in ("--only", name)]
    done = subprocess.run(
        command("--out", str(tmp_path), "--dry-run", "--no-build", *only),
        cwd=tables.TOP, env=environment(), capture_output=True, text=True, timeout=240,
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
    text = path.with_suffix(".txt").read_text()
    assert "DRY RUN" in text
    (far,) = (f for f in study.of("models/clip/2", "loss_difference") if f.labels["variant"] == "mosaic")
    assert far.value is not None, "the whole path"
    assert far.value < 0.02, "and its answer is right"


def test_a_run_that_is_killed_half_way_leaves_a_file_that_can_be_read(tmp_path: Path):
    process = subprocess.Popen(
        command("--out", str(tmp_path), "--dry-run", "--no-build"),
        cwd=tables.TOP, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as lines:
        ended = [next(line for line in lines if line.startswith(name)) for name in list(RUNGS)[:3]]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(ended) == 3
    (path,) = tmp_path.glob("*.json")
    kept = load(Study, path)
    assert [part.name for part in kept.parts[:3]] == list(RUNGS)[:3]
    assert len(kept.parts) < len(RUNGS)
    assert kept.parts[2].verdict in path.with_suffix(".txt").read_text()
    assert f"==== {kept.parts[2].name}" in path.with_suffix(".log").read_text()


@pytest.mark.skipif(preflight.why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_before_anything_else(tmp_path: Path):
    done = subprocess.run(
        command("--out", str(tmp_path / "out")), cwd=tables.TOP, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "no GPU" in done.stderr
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "out").exists()


def run_in_child(function: str, folder: Path, *, hard_seconds: float = 60) -> Outcome:
    measurement = Measurement(name="made/up", asks="what comes of it?", function=f"{__name__}:{function}", seconds=1)
    order = Order(
        measurement=measurement, file=str(folder / "part.jsonl"), log=str(folder / "log"), seconds=5,
        hard_seconds=hard_seconds, dry_run=True, on_host=True,
    )  # fmt: skip
    return Server().measure(order)


def _number(value: float) -> Figure:
    return Figure(name="number", source="measured", value=value)


PASSES_AND_FAILS = """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 1 == 2
def test_long(): __import__("time").sleep(6)
def test_late(): pass
"""


def file_of_tests(bench: Bench) -> Iterator[Figure]:
    file = Path.cwd() / "test_made_up.py"
    file.write_text(PASSES_AND_FAILS)
    yield from run_tests(bench, file=str(file))


def dies(bench: Bench) -> Iterator[Figure]:
    yield _number(1.0)
    print("about to fall over", file=sys.stderr, flush=True)
    time.sleep(0.4)
    yield _number(2.0)
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_gpu_test_that_fails_is_named_and_those_that_pass_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    outcome = run_in_child("file_of_tests", tmp_path)
    assert outcome.part.status == "failed"
    assert outcome.part.reason == "AssertionError: test_wrong: assert 1 == 2"
    assert {figure.name: figure.value for figure in outcome.findings.figures} == {
        "passed": 2.0,
        "failed": 1.0,
        "skipped": 1.0,
    }
    assert outcome.part.left_out == ("test_late",)


def test_a_measurement_whose_process_dies_is_named_with_the_signal_and_its_last_words(tmp_path: Path):
    outcome = run_in_child("dies", tmp_path)
    assert outcome.part.status == "killed"
    assert "SIGSEGV" in outcome.part.reason
    assert "about to fall over" in outcome.part.reason
    assert [figure.value for figure in outcome.findings.figures][:1] == [1.0]
