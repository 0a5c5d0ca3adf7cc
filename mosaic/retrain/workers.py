"""The launcher's workers, which train and score a day: their exit codes, start, stop and end. No torch.

Torchrun does not start the ranks: it is a process between the launcher and them, and its death leaves them alive, so
two runs would write one day. The kernel kills these workers with their launcher.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from mosaic.artifact import lines_of, load
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.retrain.folder import DayFolder, Folder, Outcome, Phase
from mosaic.retrain.recipe import Recipe
from mosaic.retrain.records import Sources

DONE = 0
FAILED = 1
"""Exit code of an error that a restart does not cure."""
QUARANTINED = 5
"""Exit code of a day whose data was quarantined, not trained on."""
OUT_OF_MEMORY = 71
LOADER_DIED = 72
INTERRUPTED = 75
"""Exit code after a signal, or the end of the window; the run resumes later (``EX_TEMPFAIL``)."""
_CRASHES = {OUT_OF_MEMORY: "out of memory", LOADER_DIED: "a process that loads data was killed"}
"""Exit codes after which a restart may help."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Stop signals: the first finishes the step and saves, the second exits at once. Slurm sends SIGUSR1 before the time
limit."""
WORKER = "mosaic.retrain.worker.main"
PARTS = ("data", "train", "score")
"""Parts of a worker's task, in order: check the data, train, score versions for the gate."""
_LEFT: dict[Phase, tuple[str, ...]] = {"prepared": PARTS, "training": PARTS[1:], "trained": PARTS[2:]}
GRACE_S = 60.0
"""Seconds after the end of the window until hanging workers are killed."""
ALONE_S = 20.0
"""Seconds after a rank's failure until the others are killed."""
POLL_S = 0.5
PRINT_S, PRINT_SHARE = 5.0, 0.05
"""Least seconds between two lines about the step, and the same as a share of the time so far."""
PORTS = 20_000, 32_000
"""Ports for the rendezvous of ranks, below Linux's ephemeral ports."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class StopRequests:
    """Signal handlers of a worker that only set a flag.

    Attributes:
        received: Name of the first signal; empty before.
    """

    def __init__(self) -> None:
        self.received = ""
        for number in STOPPING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(INTERRUPTED)
        self.received = signal.Signals(number).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    how: str
    """Kind of end, such as ``done``, ``killed (SIGKILL)``, ``SIGTERM``."""
    outcome: Outcome | None = None
    """Outcome of the day; None if it continues."""
    reason: str = ""

    @property
    def crashed(self) -> bool:
        """True if a restart may help."""
        return self.outcome is None and self.how != "done"


class Workers:
    """Starts the workers of a day; ``echo`` prints the step now and then."""

    def __init__(
        self, folder: Folder, day: DayFolder, recipe: Recipe, echo: Callable[[str], None] = lambda line: None
    ) -> None:
        self._folder = folder
        self._day = day
        self._recipe = recipe
        self._children: list[subprocess.Popen[bytes]] = []
        self._stopped = ""
        self._echo = echo

    @property
    def step(self) -> int:
        checkpoints = checkpoints_in(self._day.checkpoints)
        return checkpoints[0].step if checkpoints else 0

    def run(self, phase: Phase, train_s: float | None, total_s: float | None) -> Ended:
        """Runs the rest of a day from a phase on, within limits in seconds, until it is evaluated or ends otherwise."""
        now = time.monotonic()  # the same clock in every process of this machine
        limits = {"--train-until": train_s, "--total-until": total_s}
        until = [f"{name}={now + seconds:.3f}" for name, seconds in limits.items() if seconds is not None]
        ranks, rounds = self._recipe.budget.ranks, [(_LEFT[phase], 1)]
        if ranks > 1:  # one process has the whole model for data and scores
            rounds = [((part,), ranks if part == "train" else 1) for part in _LEFT[phase]]
        with self._listening():
            for parts, count in rounds:
                ended = self._run((*parts, *until), count, math.inf if total_s is None else now + total_s)
                if ended.how != "done":
                    break
        return ended

    def inspect(self, part: str, *more: str) -> Ended:
        """Runs ``check`` or ``verify``, which print their results and write no files."""
        budget = self._recipe.budget
        with self._listening():
            return self._run((part, *more), budget.ranks if part == "verify" else 1, math.inf)

    def _run(self, arguments: tuple[str, ...], count: int, until: float) -> Ended:
        with tempfile.TemporaryDirectory(prefix="mosaic-") as aside:
            root = str(self._folder.path.absolute())  # a relative one may begin with a hyphen
            command = [sys.executable, "-P", "-m", WORKER, root, self._day.path.name, *arguments]
            command.append(f"--error-file={aside}/error")
            port = _free_port() if count > 1 else 0
            step = last_step(self._day)
            for rank in range(count):
                self._children.append(self._start(command, _rank_environment(rank, count, port)))
                if self._stopped:  # the signal came before the first child
                    self._children[-1].terminate()
            codes, overdue = self._wait(until + GRACE_S, step)
            errors = sorted(Path(aside).glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
            reason = errors[0].read_text(encoding="utf-8") if errors else ""  # later ranks miss the first
        if overdue:
            return Ended(how="hung", outcome="interrupted", reason="it did not end with its window, and was killed")
        return _ended(codes, reason, self._stopped)

    def _start(self, command: list[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env={**os.environ, **more},
            start_new_session=True,  # a terminal's Ctrl-C goes to the launcher, which forwards it once
            preexec_fn=partial(end_with, os.getpid()),  # it only makes system calls
        )

    def _wait(self, until: float, step: str) -> tuple[list[int], bool]:
        """Waits for all ranks; returns the codes of those that ended by themselves, and if the time was over.

        After a failure of one rank, the others notice within seconds, or are killed.
        """
        codes: list[int] = []
        began = printed_at = time.monotonic()
        while self._children:
            with suppress(subprocess.TimeoutExpired):
                self._children[0].wait(POLL_S)
            now = time.monotonic()
            if now - printed_at >= max(PRINT_S, PRINT_SHARE * (now - began)) and (last := last_step(self._day)) != step:
                step, printed_at = last, now
                self._echo(step)
            for child in [child for child in self._children if child.poll() is not None]:
                self._children.remove(child)
                codes.append(child.wait())
            failed = any(code not in (DONE, INTERRUPTED) for code in codes)
            if failed:
                until = min(until, time.monotonic() + ALONE_S)
            if time.monotonic() > until:
                for child in self._children:
                    _kill(child)
                    child.wait()
                self._children.clear()
                return codes, not failed
        return codes, False

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Forwards the first signal, so the step ends and is saved; kills all ranks at the second."""

        def forward(number: int, frame: FrameType | None) -> None:
            first = not self._stopped
            self._stopped = self._stopped or signal.Signals(number).name
            for child in self._children:
                if first:
                    with suppress(ProcessLookupError):
                        child.send_signal(signal.SIGTERM)
                else:
                    _kill(child)

        before: dict[signal.Signals, Any] = {number: signal.signal(number, forward) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def last_step(day: DayFolder) -> str:
    """Returns the last training step in words; empty before the first."""
    rows = [row for row in lines_of(day.metrics) if "step" in row]
    if not rows:
        return ""
    row = rows[-1]
    planned = f" of {load(Sources, day.sources).num_steps}" if day.sources.is_file() else ""
    return f"step {row['step']}{planned}, loss {row.get('loss', math.nan):.4g}"


def _ended(codes: list[int], reason: str, stopped: str) -> Ended:
    if stopped:
        return Ended(how=stopped, outcome="interrupted", reason=f"stopped by {stopped}; the next run continues")
    crashes = [f"killed ({signal.Signals(-code).name})" for code in codes if code < 0]
    crashes += [how for code, how in _CRASHES.items() if code in codes]
    if crashes:
        return Ended(how=crashes[0], reason=reason)
    if QUARANTINED in codes:
        return Ended(how="quarantined", outcome="quarantined", reason=reason)
    if any(code not in (DONE, INTERRUPTED) for code in codes):
        return Ended(how="failed", outcome="failed", reason=reason or f"workers ended with {codes}; see their output")
    return Ended(how=reason, outcome="interrupted", reason=reason) if INTERRUPTED in codes else Ended(how="done")


def _rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Returns torchrun's variables; none for a single process."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in ranks.items()}} if count > 1 else {}


def _free_port() -> int:
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def end_with(launcher: int) -> None:
    """Makes the kernel kill this process with the one that started it, so two runs never write the same day."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher died before prctl
        os._exit(FAILED)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
