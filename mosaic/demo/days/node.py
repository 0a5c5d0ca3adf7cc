"""Operations of a timer, a user and failures on a retraining folder: start, edit, copy, kill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from resource import RLIMIT_FSIZE, prlimit
from time import monotonic, sleep

from mosaic.errors import MosaicError
from mosaic.lines import steps_in
from mosaic.retrain.folder import DayFolder, Folder

ASIDE = "aside"
"""Subfolder for copies of the folder."""
PATIENCE_S = 180.0
"""Seconds after which a missing event of a run is an error."""
_LOOK_S = 0.005
_RETRAIN = (sys.executable, "-m", "mosaic", "retrain")

Say = Callable[[str], None]
"""Prints a line."""


@dataclass(frozen=True, slots=True)
class Node:
    """A retraining folder; ``say`` prints the lines of its runs, and ``on_cpu`` hides GPUs from them."""

    path: Path
    say: Say
    on_cpu: bool = False

    def day(self, name: date) -> DayFolder:
        """Returns the files of a day."""
        return Folder(self.path).day(name.isoformat())

    def begin(self, name: date, clock: str = "01:00:00") -> Run:
        """Starts ``mosaic retrain run`` like a timer in the night after a day, at a UTC time."""
        now = f"{(name + timedelta(days=1)).isoformat()}T{clock}Z"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if self.on_cpu else None
        return Run(self.day(name), [*_RETRAIN, "run", str(self.path), "--now", now], self.say, environment)

    def run(self, name: date) -> int:
        """Starts a run and waits; returns its exit code."""
        return self.begin(name).wait()

    def promote(self, version: str) -> None:
        """Promotes a version by the command line."""
        self.say(f"$ mosaic retrain promote {self.path.name} {version}")
        command = [*_RETRAIN, "promote", str(self.path), version]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        for line in (ended.stdout + ended.stderr).splitlines():
            self.say(line)
        if ended.returncode:
            raise MosaicError(f"mosaic retrain promote ended with {ended.returncode}; see the lines above")

    def copy(self, name: str) -> Node:
        """Copies the folder with its state."""
        to = self.path / ASIDE / name
        shutil.copytree(self.path, to, symlinks=True, ignore=shutil.ignore_patterns(ASIDE))
        return replace(self, path=to)

    def edit(self, file: str, old: str, new: str) -> None:
        """Replaces a text of a file; raises MosaicError unless it occurs once."""
        text = (self.path / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise MosaicError(f"{self.path / file} has {old!r} {text.count(old)} times; it must have it once")
        (self.path / file).write_text(text.replace(old, new), encoding="utf-8")

    def set(self, **values: str) -> None:
        """Changes settings of the recipe, each written ``table__key="value as TOML has it"``."""
        path = Folder(self.path).recipe
        text = path.read_text(encoding="utf-8")
        for name, value in values.items():
            table, _, key = name.partition("__")
            text = with_setting(text, table, key, value)
        path.write_text(text, encoding="utf-8")


class Run:
    """A running ``mosaic retrain run``; its output so far is in ``lines``."""

    def __init__(self, day: DayFolder, command: list[str], say: Say, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._is_killed = False
        self._day = day
        self._say = say
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        code = self._child.wait()
        self._reader.join(PATIENCE_S)
        return code

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is in the day's log; raises MosaicError if the run ends before, or takes too long."""
        self._wait_for(lambda: max(steps_in(self._day.metrics), default=0) >= step, f"step {step}")

    def wait_for_line(self, part: str) -> None:
        """Waits for an output line with some text, as ``wait_for_step``."""
        self._wait_for(lambda: any(part in line for line in self.lines), f"a line with {part!r}")

    def kill_workers(self) -> None:
        """Kills the training processes, like the kernel when memory runs out."""
        self._kill(*self._workers())

    def kill_launcher(self) -> None:
        """Kills the launcher, and waits until its workers end by themselves."""
        self._is_killed = True
        self._kill(self._child.pid)
        self.wait()

    def kill_all(self) -> None:
        """Kills all of its processes at once, like a power failure."""
        self._is_killed = True
        self._kill(self._child.pid, *self._workers())
        self.wait()

    def limit_files(self, num_bytes: int | None) -> None:
        """Limits the size of its workers' files, like a full disk; None for no limit.

        A write then fails with EFBIG ("file too large") instead of ENOSPC; both mean no room.
        """
        for pid in self._workers():
            with suppress(ProcessLookupError):
                hard = prlimit(pid, RLIMIT_FSIZE)[1]
                prlimit(pid, RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    def _workers(self) -> tuple[int, ...]:
        children = Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children")
        try:
            return tuple(int(pid) for pid in children.read_text(encoding="ascii").split())
        except OSError:
            return ()

    def _kill(self, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as printed:
            for line in printed:
                self.lines.append(line.rstrip())
                if not self._is_killed:  # later messages about the kill are not news
                    self._say(self.lines[-1])

    def _wait_for(self, happened: Callable[[], bool], what: str) -> None:
        until = monotonic() + PATIENCE_S
        while not happened():
            ended = self._child.poll() is not None
            if ended or monotonic() > until:
                if ended:
                    self.wait()  # for its last lines
                self.kill_all()
                came = f"ended with {self._child.returncode}" if ended else f"took more than {PATIENCE_S:.0f} s"
                raise MosaicError(f"the run {came} before {what} came; see what it printed above")
            sleep(_LOOK_S)


def with_setting(text: str, table: str, key: str, value: str) -> str:
    """Returns a recipe's text with a changed or added setting of a table."""
    line = f"{key} = {value}"
    head, heading, body = text.partition(f"\n[{table}]\n")
    if not heading:
        return f"{text.rstrip()}\n\n[{table}]\n{line}\n"
    body, following, tail = body.partition("\n[")
    changed, count = re.subn(rf"^{key} *=.*$", lambda _: line, body, flags=re.MULTILINE)
    return head + heading + (changed if count else f"{line}\n{body}") + following + tail
