"""Workers that the launcher kills."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.retrain.kills import alive
from bench.retrain.small_folder import write_folder
from mosaic.retrain import workers
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.workers import Ended, Workers

FOREVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


class Scripted(Workers):
    """Starts other programs in the place of workers, one for each rank."""

    def __init__(self, folder: Path, *programs: str) -> None:
        node = write_folder(folder, budget={"ranks": len(programs), "batch": 16})
        super().__init__(node, node.day("2026-11-20"), read_recipe(node.recipe))
        self.programs = list(programs)
        self.started: list[subprocess.Popen[bytes]] = []

    def _start(self, command: list[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        assert (command[1], Path(command[4]).is_absolute()) == ("-P", True)
        child = super()._start([sys.executable, "-c", self.programs[int(more.get("RANK", "0"))], command[-1]], more)
        self.started.append(child)
        return child


def run(folder: Path, *programs: str, total_s: float | None = None) -> Ended:
    scripted = Scripted(folder, *programs)
    ended = scripted.run("training", None, total_s)
    assert alive(tuple(child.pid for child in scripted.started)) == ()
    return ended


def test_a_rank_that_waits_for_a_failed_one_and_a_worker_that_hangs_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "ALONE_S", 0.2)
    monkeypatch.setattr(workers, "GRACE_S", 0.2)
    failing = "import sys; print('mine', end='', file=open(sys.argv[1].partition('=')[2] + '.1', 'w')); sys.exit(71)"
    monkeypatch.chdir(tmp_path)
    ended = run(Path("-node"), FOREVER, failing)
    assert (ended.how, ended.reason) == ("out of memory", "mine")
    ended = run(tmp_path, FOREVER, total_s=0.3)
    assert (ended.how, ended.outcome) == ("hung", "interrupted")
