"""Days that two ranks train: one that a single rank ends, and one that is undisturbed and killed.

Run as ``python retraining_ranks.py stopped|killed FOLDER``; prints a line of JSON with what a test looks at.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retraining_forks import Fork, launcher, start

from bench.retrain.kills import alive, descendants
from bench.retrain.small_folder import bits_of, write_folder, write_recipe
from mosaic.artifact import load, steps_in
from mosaic.retrain.folder import Folder
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.records import Trained

DAY = "2026-11-20"
MICRO_BATCHES = {"micro_batches": 4}
NORM = {"BatchNorm1d": "LayerNorm"}


def written(path: Path, changes: dict[str, str], budget: dict[str, Any]) -> Folder:
    """Writes a folder whose program has some other lines."""
    folder = write_folder(path, DAY, budget=budget, export="ema")
    program = path / "train.py"
    text = program.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    program.write_text(text)
    return folder


def strike(process: Fork, number: int, ready: Callable[[], bool], choose: Callable[[tuple[int, ...]], int]) -> Any:
    """Sends a signal to the launcher or one of its ranks once something is so; returns the ranks."""
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    ranks = tuple(pid for pid in descendants(process.pid) if pid != process.pid)
    os.kill(choose(ranks), number)
    return ranks


def stopped(top: Path) -> dict[str, Any]:
    """Stops a day of two ranks after five steps; runs it on one rank to its end."""
    folder = written(top / "stopped", NORM, {"ranks": 2, **MICRO_BATCHES})
    day, process = folder.day(DAY), start(folder)
    strike(process, signal.SIGTERM, lambda: max(steps_in(day.metrics), default=0) >= 5, lambda ranks: process.pid)
    code = process.wait()
    write_recipe(folder.path, budget=MICRO_BATCHES)
    ended = start(folder).wait()
    trained = load(Trained, day.trained)
    return {
        "codes": [code, ended],
        "steps": trained.step,
        "starts": [(each.ended, each.from_step) for each in day.state.starts],
        "differs": [trained.notes.differs_from_step, trained.notes.differs_because],
    }


def killed(top: Path) -> dict[str, Any]:
    """Kills the launcher of two ranks once their plan is stored; then a rank; verifies the day."""
    quiet = written(top / "quiet", NORM, {"ranks": 2, **MICRO_BATCHES})
    process = start(quiet)
    ranks = strike(process, signal.SIGKILL, quiet.day(DAY).plan.is_file, lambda ranks: process.pid)
    process.wait()
    left = alive(ranks)
    disturbed = Folder(top / "disturbed")
    shutil.copytree(quiet.path, disturbed.path, symlinks=True)  # both run the plan that was chosen before the kill
    codes = [start(quiet).wait()]
    day, process = disturbed.day(DAY), start(disturbed)
    strike(process, signal.SIGKILL, lambda: len(steps_in(day.metrics)) > 5, max)
    codes.append(process.wait())
    verified = launcher.Workers(disturbed, day, read_recipe(disturbed.recipe)).inspect("verify")
    expected, bits = bits_of(quiet.day(DAY)), bits_of(day)
    return {
        "left": left,
        "codes": codes,
        "differs": [name for name in expected if expected[name] != bits[name]],
        "from_step": load(Trained, day.trained).notes.differs_from_step,
        "outcome": day.state.outcome,
        "starts": [each.ended for each in day.state.starts],
        "verified": [verified.outcome, verified.reason],
    }


if __name__ == "__main__":
    print(json.dumps({"stopped": stopped, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))), flush=True)
