"""A day on another number of ranks at each start: the same samples, and with ``ranks_exact`` the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.retrain.small_folder import bits_of, write_folder, write_recipe
from mosaic.artifact import load
from mosaic.lines import steps_in
from mosaic.retrain.folder import Folder
from mosaic.train.records import Trained

DAY = "2026-11-22"


def run(folder: Folder, *, ranks: int, stop_at: int | None = None, **budget: object) -> int:
    """Runs a folder as a timer would, on so many ranks, and tells it to stop once a step is logged."""
    write_recipe(folder.path, budget={"ranks": ranks, "micro_batches": 4, **budget})
    child = subprocess.Popen([sys.executable, "-m", "mosaic.cli", "retrain", "run", str(folder.path)])
    while child.poll() is None:
        if stop_at is not None and max(steps_in(folder.day(DAY).metrics), default=0) >= stop_at:
            child.send_signal(signal.SIGTERM)
            stop_at = None
        time.sleep(0.005)
    return child.returncode


def test_exact_ranks_give_the_bits_of_one_rank_whatever_their_number_at_each_start(tmp_path: Path):
    one, several = (write_folder(tmp_path / name, DAY) for name in ("one", "several"))
    assert run(one, ranks=1, ranks_exact=True) == 0
    assert run(several, ranks=2, ranks_exact=True, stop_at=5) == 75
    assert run(several, ranks=1, ranks_exact=True) == 0
    assert bits_of(several.day(DAY)) == bits_of(one.day(DAY))
    assert load(Trained, several.day(DAY).trained).notes.differs_from_step is None


def test_the_report_names_the_step_from_which_other_ranks_give_other_bits(tmp_path: Path):
    folder = write_folder(tmp_path / "folder", DAY)
    program = folder.path / "train.py"
    program.write_text(program.read_text().replace("nn.BatchNorm1d(16)", "nn.LayerNorm(16)"))
    assert run(folder, ranks=1, stop_at=5) == 75
    assert run(folder, ranks=2) == 0
    trained = load(Trained, folder.day(DAY).trained)
    assert trained.step == 40
    assert 5 <= (trained.notes.differs_from_step or 0) < 40
    assert "there were 1 ranks and are 2" in trained.notes.differs_because


def test_check_names_what_cannot_be_divided_over_ranks(tmp_path: Path):
    folder = write_folder(tmp_path / "folder", DAY, budget={"ranks": 2})
    command = [sys.executable, "-m", "mosaic.cli", "retrain", "check", str(folder.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "left.1 is a BatchNorm1d" in done.stderr
    assert "set ranks_exact = true, or ranks = 1" in done.stderr
