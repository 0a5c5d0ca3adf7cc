"""Kills of ``mosaic retrain run``: a chain at random instants, and some on the way of a promotion.

Run as ``python retraining_kills.py chain|promotion FOLDER``; prints what tests look at, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import retraining_forks
from retraining_forks import Fork, launcher, start

from bench.retrain.kills import killed_days
from bench.retrain.small_folder import write_day, write_folder
from mosaic.artifact import to_json
from mosaic.lines import lines_of
from mosaic.retrain import steering, versions
from mosaic.retrain.folder import Folder
from mosaic.retrain.report import is_reported

FIRST, SECOND = "2026-11-20", "2026-11-21"
EVERY = 13
"""Of a promotion's writes to the disk every thirteenth is met by a kill; the bench kills at random instants."""
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def kill_chain(top: Path) -> None:
    """Kills whoever runs, at random instants."""
    for day in killed_days(top, start, count=6, seed=5, longest_s=0.6, pause_s=0.01):
        tell(**json.loads(to_json(day)))


def kill_promotion(top: Path) -> None:
    """Kills the launcher at every thirteenth write to the disk once all is scored; then goes on, and goes back."""
    before = write_folder(top / "before", FIRST, promote={"hooks": ["echo $MOSAIC_VERSION >> told"]})
    assert start(before).wait() == 0
    write_day(before.path, SECOND)
    assert Fork(lambda: _until_evaluated(before)).wait() == 0
    assert before.days()[-1].state.phase == "evaluated"
    for instant in range(1, 1000, EVERY):
        folder = Folder(top / "killed")
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(before.path, folder.path, symlinks=True)
        ended = Fork(lambda instant=instant, folder=folder: _killed_at(instant, folder)).wait()
        seen = versions.linked(folder, "champion")
        again = start(folder).wait()
        promoted = [row for row in lines_of(folder.history) if row["event"] == "promoted"]
        found = {
            "ended": ended,
            "seen": seen,
            "again": again,
            "outcome": folder.days()[-1].state.outcome,
            "champion": versions.linked(folder, "champion"),
            "told": (folder.path / "told").read_text().split(),
            "versions": [each.name for each in versions.all_versions(folder)],
            "earlier": [row["before"] for row in promoted],
            "left": [path.name for path in (*folder.versions.glob(".*"), *folder.path.glob(".champion*"))],
            "page": is_reported(folder.days()[-1]),
        }
        if instant % 3 == 0 or ended == 0:
            assert Fork(lambda folder=folder: bool(steering.rollback(folder.path)) - 1).wait() == 0
            assert start(folder).wait() == 0
            found["after_back"] = versions.linked(folder, "champion")
        tell(**found)
        if ended == 0:
            return


def _until_evaluated(folder: Folder) -> None:
    launcher._Day._decide = lambda day: os._exit(0)  # type: ignore[method-assign]
    launcher.run(folder.path, print)


def _killed_at(instant: int, folder: Folder) -> int:
    left = instant

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(event: str, arguments: tuple[Any, ...]) -> None:
        reads = event == "open" and not int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if event in EVENTS and not reads and str(folder.path) in str(arguments[0]):
            tick()

    flush = os.fsync

    def fsync(handle: int) -> None:
        flush(handle)
        tick()

    os.fsync = fsync
    sys.addaudithook(watched)
    return launcher.run(folder.path, print)


WAYS: dict[str, Callable[[Path], None]] = {"chain": kill_chain, "promotion": kill_promotion}

if __name__ == "__main__":
    assert retraining_forks.torch.get_num_threads() == 1
    WAYS[sys.argv[1]](Path(sys.argv[2]))
