"""A day that two ranks train and score in a pipeline: undisturbed, and killed; and what ``check`` says of it.

Run as ``python retraining_pipeline.py FOLDER``; prints what tests look at, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from retraining_forks import Fork, launcher, start

from bench.retrain.chain import alive, descendants
from bench.retrain.small_folder import bits_of, write_folder
from mosaic.artifact import load
from mosaic.lines import steps_in
from mosaic.retrain.folder import Folder
from mosaic.retrain.recipe import read_recipe
from mosaic.train.records import StoredPlan, Trained

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


def aside(folder: Folder, part: str) -> dict[str, Any]:
    """Runs ``check`` or ``verify`` in a fork; returns how it ended."""
    day = folder.day("check" if part == "check" else DAY)
    workers = launcher.Workers(folder, day, read_recipe(folder.recipe))
    ended = workers.aside(part)
    return {"part": part, "outcome": ended.outcome, "reason": ended.reason}


def killed_once(folder: Folder, *, ready: Any, who: int) -> bool:
    """Starts a run, and kills its launcher (-1) or a rank once something is so; returns whether that met a run."""
    process = start(folder)
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    ranks = [pid for pid in descendants(process.pid) if pid != process.pid]
    os.kill(process.pid if who < 0 else ranks[who], signal.SIGKILL)
    if who < 0:
        process.wait()
        return not alive(tuple(ranks))
    return process.wait() == 0


def main(top: Path) -> None:
    tell(**aside(written(top / "batch norm", {}), "check"))
    quiet = written(top / "quiet", LAYERS)
    tell(**aside(quiet, "check"))
    day = quiet.day(DAY)
    tell(planned=killed_once(quiet, ready=day.plan.is_file, who=-1))
    shutil.copytree(quiet.path, top / "killed", symlinks=True)
    killed = Folder(top / "killed")
    tell(quiet=start(quiet).wait())
    steps = killed.day(DAY).metrics
    tell(goes_on=killed_once(killed, ready=lambda: len(steps_in(steps)) > 5, who=1))
    one, other = bits_of(day), bits_of(killed.day(DAY))
    state, trained = killed.day(DAY).state, load(Trained, killed.day(DAY).trained)
    tell(
        differs=[name for name in one if one[name] != other[name]],
        outcome=state.outcome,
        starts=[each.ended for each in state.starts],
        steps=trained.step,
        same_bits=trained.notes.differs_from_step is None,
        plan=load(StoredPlan, day.plan).said,
    )
    tell(**aside(killed, "verify"))


if __name__ == "__main__":
    assert Fork
    main(Path(sys.argv[1]))
