"""The study of a day's cost over a bare loop's, at sizes that take a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.ranks.launch import on_ranks
from bench.retrain.pieces import pieces, told
from bench.retrain.small_folder import write_folder
from bench.retrain.starts import seconds_to_first_step
from bench.retrain.steps import LOST, RATIO


def test_steps_of_both_loops_are_compared_with_saves_and_without():
    code = "from bench.retrain.steps import *; [print(f.name, len(f.samples), f.value, sep='|') for f in " + (
        "steps(workers=0, rounds=5, block=2, rows=1)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    lines = (line.split("|") for line in done.stdout.splitlines())
    found = {name: (int(count), float(value)) for name, count, value in lines}
    counted = [found[name.format(workers=0)][0] for name in (RATIO, LOST) if name.format(workers=0) in found]
    assert sum(counted) == 4  # which blocks have a checkpoint, the clock decides
    assert all(value > 0 for name, (_, value) in found.items() if "ratio" in name)


def test_pieces_of_a_step_are_told_one_by_one():
    figures = [*pieces(calls=1), *on_ranks(lambda rank, size: told(rank, size, calls=1), 2, 60)]
    assert len({figure.name for figure in figures}) == len(figures) == 6
    assert all(figure.name.endswith(", us") and figure.value for figure in figures)


def test_a_run_that_ends_before_its_first_step_is_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_folder(tmp_path, "2026-11-20")
    monkeypatch.setattr("bench.retrain.starts.program", lambda folder: subprocess.Popen(["true"]))
    with pytest.raises(RuntimeError, match="made no step"):
        seconds_to_first_step(folder)
