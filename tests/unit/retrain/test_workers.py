"""The launcher's view of its workers: how they end, what it passes on, and whom it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.retrain.chain import alive
from bench.retrain.small_folder import write_folder
from mosaic.retrain import workers
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.workers import Ended, Workers

FOREVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
UNTIL_TOLD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(flush=True)
time.sleep(60)
"""


def ends(code: int, words: str = "") -> str:
    """A program that leaves words and a code."""
    return f"""
import os, signal, sys
if {words!r}:
    open(sys.argv[1], "w").write({words!r})
if {code} < 0:
    os.kill(os.getpid(), {-code})
sys.exit({code})
"""


class Scripted(Workers):
    """Starts other programs in the place of workers, one for each rank."""

    def __init__(self, folder: Path, *programs: str) -> None:
        made = write_folder(folder, budget={"ranks": len(programs), "batch": 16})
        super().__init__(made, made.day("2026-11-20"), read_recipe(made.recipe))
        self.programs = list(programs)
        self.started: list[subprocess.Popen[bytes]] = []

    def _start(self, command: list[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        words = next(each.removeprefix("--error-file=") for each in command if each.startswith("--error-file="))
        rank = int(more.get("RANK", "0"))
        child = super()._start([sys.executable, "-c", self.programs[rank], words], more)
        self.started.append(child)
        return child


def run(folder: Path, *programs: str, total_s: float | None = None) -> tuple[Ended, Scripted]:
    made = Scripted(folder, *programs)
    ended = made.run("training", None, total_s)
    assert alive(tuple(child.pid for child in made.started)) == ()
    return ended, made


@pytest.mark.parametrize(
    ("code", "how", "outcome", "crashed"),
    [
        (0, "done", None, False),
        (1, "failed", "failed", False),
        (5, "quarantined", "quarantined", False),
        (71, "out of memory", None, True),
        (72, "a process that loads data was killed", None, True),
        (75, "why", "interrupted", False),
        (-9, "killed (SIGKILL)", None, True),
    ],
)
def test_codes_say_how_a_day_goes_on(tmp_path: Path, code: int, how: str, outcome: str | None, crashed: bool):
    ended, _ = run(tmp_path, ends(code, "why" if code > 0 else ""))
    assert (ended.how, ended.outcome, ended.crashed) == (how, outcome, crashed)
    assert ended.reason == ("why" if code > 0 else "")


def test_a_rank_that_waits_for_a_failed_one_and_a_worker_that_hangs_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "ALONE_S", 0.2)
    monkeypatch.setattr(workers, "GRACE_S", 0.2)
    assert run(tmp_path, FOREVER, ends(71))[0].how == "out of memory"
    ended, _ = run(tmp_path, FOREVER, total_s=0.3)
    assert (ended.how, ended.outcome) == ("hung", "interrupted")


@pytest.mark.parametrize(("program", "times"), [(UNTIL_TOLD, 1), (FOREVER, 2)])
def test_one_signal_is_passed_on_and_the_second_ends_all_at_once(tmp_path: Path, program: str, times: int):
    made = Scripted(tmp_path, program)
    start = made._start

    def started(command: list[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        child = start(command, more)
        threading.Thread(target=tell, args=(child,)).start()
        return child

    def tell(child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            told.wait(0.2)

    told, popen = threading.Event(), subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "_start", started)
        patch.setattr(subprocess, "Popen", lambda *given, **more: popen(*given, **more, stdout=subprocess.PIPE))
        ended = made.run("training", None, None)
    (child,) = made.started
    assert child.stdout is not None
    child.stdout.close()
    assert (ended.how, ended.outcome) == ("SIGTERM", "interrupted")
    assert alive((child.pid,)) == ()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
