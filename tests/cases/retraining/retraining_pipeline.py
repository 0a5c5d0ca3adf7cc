"""A day that two ranks train and score in a pipeline: undisturbed, and killed.

Run as ``python retraining_pipeline.py FOLDER``; prints what tests look at, a line of JSON each.
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

from bench.retrain.chain import alive, descendants
from bench.retrain.small_folder import bits_of, write_folder
from mosaic.artifact import load
from mosaic.lines import steps_in
from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.records import Trained

DAY = "2026-11-20"
BUDGET = {"ranks": 2, "pipeline": True, "micro_batches": 4, "memory_gb": 0.00006}
"""Too little for the whole model on each rank."""
TOWER = "nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))"
LAYERS = {
    TOWER: f"nn.Sequential(*({TOWER.replace('BatchNorm1d', 'LayerNorm').replace('4', 'i', 1)} for i in (4, 16)))",
    "nn.Linear(32, 2)": "nn.Sequential(*(nn.Linear(32, i) for i in (32, 32, 32, 2)))",
}
"""Of the user's program, lists of layers in the place of towers and a head."""


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def written(path: Path, changes: dict[str, str], **changed: Any) -> Folder:
    """Writes a folder whose program has some other lines."""
    folder = write_folder(path, DAY, budget=BUDGET, **changed)
    program = path / "train.py"
    text = program.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    program.write_text(text)
    return folder


def aside(folder: Folder, part: str, day: str) -> dict[str, Any]:
    """Runs ``check`` or ``verify``; returns how it ended."""
    ended = launcher.Workers(folder, folder.day(day), read_recipe(folder.recipe)).aside(part)
    return {"outcome": ended.outcome, "reason": ended.reason}


def strike(process: Fork, ready: Callable[[], bool], choose: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
    """Kills the launcher or one of its ranks once something is so; returns the ranks."""
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    ranks = tuple(pid for pid in descendants(process.pid) if pid != process.pid)
    os.kill(choose(ranks), signal.SIGKILL)
    return ranks


def main(top: Path) -> None:
    quiet = written(top / "quiet", LAYERS)
    process = start(quiet)
    ranks = strike(process, quiet.day(DAY).plan.is_file, lambda ranks: process.pid)
    tell(launcher_killed={"code": process.wait(), "nobody_left": not alive(ranks)})
    killed = Folder(top / "killed")
    shutil.copytree(quiet.path, killed.path, symlinks=True)  # both run the plan that was chosen before the kill
    tell(quiet=start(quiet).wait())
    day = killed.day(DAY)
    process = start(killed)
    strike(process, lambda: len(steps_in(day.metrics)) > 5, max)
    tell(killed=process.wait(), **compared(quiet.day(DAY), day))
    tell(verify=aside(killed, "verify", DAY))


def compared(quiet: DayFolder, killed: DayFolder) -> dict[str, Any]:
    expected, found = bits_of(quiet), bits_of(killed)
    trained = load(Trained, killed.trained)
    return {
        "differs": [name for name in expected if expected[name] != found[name]],
        "same_bits": trained.notes.differs_from_step is None,
        "steps": trained.step,
        "outcome": killed.state.outcome,
        "starts": [each.ended for each in killed.state.starts],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
