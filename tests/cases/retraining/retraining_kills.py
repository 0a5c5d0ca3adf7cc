"""Kills of ``mosaic retrain run``: a chain at random instants, and some on the way of a promotion.

Run as ``python retraining_kills.py chain|promotion FOLDER``; prints what tests look at, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from checkpoint_kills import killed_at
from retraining_forks import Fork, launcher, start

from bench.retrain.kills import killed_days
from bench.retrain.small_folder import write_day, write_folder
from mosaic.artifact import lines_of, to_json
from mosaic.retrain import steering, versions
from mosaic.retrain.folder import Folder
from mosaic.retrain.report import is_reported

FIRST, SECOND = "2026-11-20", "2026-11-21"
EVERY = 13
"""A kill meets every thirteenth write of a promotion; the bench kills at random instants."""


def kill_chain(top: Path) -> None:
    """Kills launchers, workers and loaders at random instants."""
    for day in killed_days(top, start, count=6, seed=5, longest_s=0.6, pause_s=0.01):
        print(json.dumps(json.loads(to_json(day))), flush=True)


def kill_promotion(top: Path) -> None:
    """Kills the launcher at every thirteenth write once all is scored; then resumes, and rolls back."""
    before = write_folder(top / "before", FIRST, promote={"hooks": ["echo $MOSAIC_VERSION >> told"]})
    assert start(before).wait() == 0
    write_day(before.path, SECOND)
    assert Fork(lambda: _until_evaluated(before)).wait() == 0
    assert before.days()[-1].phase == "evaluated"
    for instant in range(1, 1000, EVERY):
        folder = Folder(top / "killed")
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(before.path, folder.path, symlinks=True)
        ended = Fork(
            lambda instant=instant, folder=folder: killed_at(instant, folder.path, partial(run, folder))
        ).wait()
        seen = versions.linked(folder, "champion")
        again = start(folder).wait()
        result = {
            "ended": ended,
            "seen": seen,
            "again": again,
            "outcome": folder.days()[-1].state.outcome,
            "champion": versions.linked(folder, "champion"),
            "told": (folder.path / "told").read_text().split(),
            "versions": [each.name for each in versions.all_versions(folder)],
            "earlier": [row["before"] for row in lines_of(folder.history) if row["event"] == "promoted"],
            "left": [path.name for path in (*folder.versions.glob(".*"), *folder.path.glob(".champion*"))],
            "page": is_reported(folder.days()[-1]),
        }
        if instant % 3 == 0 or ended == 0:
            assert Fork(lambda folder=folder: bool(steering.rollback(folder.path)) - 1).wait() == 0
            assert start(folder).wait() == 0
            result["after_back"] = versions.linked(folder, "champion")
        print(json.dumps(result), flush=True)
        if ended == 0:
            return


def run(folder: Folder) -> int:
    return launcher.run(folder.path, print)


def _until_evaluated(folder: Folder) -> None:
    launcher._Day._decide = lambda day: os._exit(0)  # type: ignore[method-assign]
    run(folder)


WAYS: dict[str, Callable[[Path], None]] = {"chain": kill_chain, "promotion": kill_promotion}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Path(sys.argv[2]))
