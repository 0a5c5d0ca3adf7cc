"""From the start of ``mosaic retrain run`` to the end of a day's first step, against that of a bare loop's program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import in_turn
from bench.record import Figure, median_figure, missing_figure
from bench.retrain.chain import program
from bench.retrain.small_folder import PROGRAM, write_day, write_folder, write_recipe
from mosaic.artifact import load
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.lines import lines_of
from mosaic.retrain.folder import Folder
from mosaic.train.records import StoredPlan

FIRST_DAY = "first day: start to first step, plans tried, s"
NEXT_DAY = "new day, plan of the day before: start to first step, s (goal: 15)"
RESTART = "restart after a kill: start to first step, s (goal: 15)"
BARE = "bare loop: start to first step, s"
RATIO = "restart over the bare loop's start, ratio"
_PATIENCE_S = 120.0
_BUDGET = {"colocate": True, "workers": 2, "save": "0.3s"}
_ENDLESS = 1_000_000
_BARE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader
import {module} as user
model = user.Towers()
optimizers, _ = user.make_optimizer(model, 100)
batch = next(iter(DataLoader(user.Rows(Path(sys.argv[2]), True), 16, shuffle=True, num_workers=2)))
user.loss(model, batch).backward()
for optimizer in optimizers:
    optimizer.step()
"""


def starts(*, rounds: int = 3) -> Iterator[Figure]:
    """Measures starts of a folder's first day, of its second, and after kills of that.

    Args:
        rounds: Restarts and starts of the bare loop, in turn.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(Path(place) / "folder", "2026-11-20", budget={**_BUDGET, "steps": 20})
        yield median_figure(FIRST_DAY, [seconds_to_first_step(folder, kill=False)])
        yield median_figure("page of a day, kB (goal: 100)", [folder.days()[0].page.stat().st_size / 1e3])
        write_recipe(folder.path, budget={**_BUDGET, "steps": _ENDLESS})
        write_day(folder.path, "2026-11-21")
        if not load(StoredPlan, folder.days()[0].plan).is_measured:
            yield missing_figure(NEXT_DAY, "the machine was too busy to measure a plan on the first day")
            seconds_to_first_step(folder)
        else:
            yield median_figure(NEXT_DAY, [seconds_to_first_step(folder)])
        restarts, bare = in_turn(lambda: seconds_to_first_step(folder), lambda: _bare(folder), rounds)
        yield median_figure(RESTART, restarts)
        yield median_figure(BARE, bare)
        yield median_figure(RATIO, [one / other for one, other in zip(restarts, bare, strict=True)])
        yield from _phases(folder)


def seconds_to_first_step(folder: Folder, *, kill: bool = True) -> float:
    """Starts a run; returns the seconds to the end of its first step, after a kill behind its first checkpoint."""
    began = time.time()
    process = program(folder)
    try:
        first = _wait_for_step(folder, began, process)
        before = _newest(folder)
        while kill and _newest(folder) <= before:
            _still(process, began)
        if not kill:
            process.wait(_PATIENCE_S)
    finally:
        process.kill()  # its workers end with it
        process.wait()
    return first - began


def _wait_for_step(folder: Folder, began: float, process: subprocess.Popen[bytes]) -> float:
    while True:
        for row in lines_of(folder.days()[-1].metrics) if folder.days() else ():
            if row["at"] > began:
                return float(row["at"])
        _still(process, began)


def _newest(folder: Folder) -> int:
    found = checkpoints_in(folder.days()[-1].checkpoints)
    return found[0].step if found else 0


def _still(process: subprocess.Popen[bytes], began: float) -> None:
    """Raises if nothing more is to be expected."""
    if process.poll() is not None or time.time() - began > _PATIENCE_S:
        raise RuntimeError(f"the run made no step that was looked for (exit code {process.poll()})")
    time.sleep(0.01)


def _bare(folder: Folder) -> float:
    began = time.perf_counter()
    code = _BARE.format(module=PROGRAM.stem)
    data = folder.path / "data" / "2026-11-21"
    subprocess.run([sys.executable, "-c", code, str(PROGRAM.parent), str(data)], check=True, env=_environment())
    return time.perf_counter() - began


def _phases(folder: Folder) -> Iterator[Figure]:
    """Measures a restart phase by phase, in processes of its own."""
    command = [sys.executable, "-c", "import mosaic.cli.main, mosaic.retrain.run"]
    began = time.perf_counter()
    subprocess.run(command, check=True, env=_environment())
    yield median_figure("restart, loading the launcher, s", [time.perf_counter() - began])
    command = [sys.executable, "-m", "bench.retrain.phases", str(folder.path), folder.days()[-1].path.name]
    said = subprocess.run(command, check=True, capture_output=True, env=_environment()).stdout
    for name, seconds in json.loads(said).items():
        yield median_figure(f"restart, {name}, s", [seconds])


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
