"""A day that two ranks begin and one ends.

Run as ``python retraining_ranks.py FOLDER``; prints what a test looks at, a line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from retraining_forks import start

from bench.retrain.small_folder import write_folder, write_recipe
from mosaic.artifact import load
from mosaic.lines import steps_in
from mosaic.retrain.folder import Folder
from mosaic.retrain.records import Trained

DAY = "2026-11-20"
MICRO_BATCHES = {"micro_batches": 4}
STOP_AT = 5


def begun_by_two(folder: Folder, budget: dict[str, Any]) -> dict[str, Any]:
    """Runs a day on two ranks and tells it to stop once some steps are logged; then runs it on one to its end."""
    day, is_told = folder.day(DAY), False
    write_recipe(folder.path, budget={"ranks": 2, **budget})
    process = start(folder)
    while process.poll() is None:
        if not is_told and max(steps_in(day.metrics), default=0) >= STOP_AT:
            process.send_signal(signal.SIGTERM)
            is_told = True
        time.sleep(0.005)
    stopped_at = max(steps_in(day.metrics))
    write_recipe(folder.path, budget=budget)
    ended = start(folder).wait()
    trained = load(Trained, day.trained)
    return {
        "stopped": process.wait(),
        "stopped_at": stopped_at,
        "ended": ended,
        "step": trained.step,
        "differs_from_step": trained.notes.differs_from_step,
        "differs_because": trained.notes.differs_because,
        "starts": [(start.ended, start.from_step) for start in day.state.starts],
    }


def main(top: Path) -> None:
    other = write_folder(top / "other", DAY, budget=MICRO_BATCHES)
    program = other.path / "train.py"
    program.write_text(program.read_text().replace("nn.BatchNorm1d(16)", "nn.LayerNorm(16)"))
    print(json.dumps(begun_by_two(other, MICRO_BATCHES)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
