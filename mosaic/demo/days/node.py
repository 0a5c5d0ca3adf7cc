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
        ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in ended.stdout.splitlines():
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


def with_setting(text: str, table: str, key: str, value: str) -> str:
    """Returns a recipe's text with a setting of a table; no two of its tables have settings of one name."""
    text = re.sub(rf"^{key} *=.*\n", "", text, flags=re.MULTILINE)
    heading = f"\n[{table}]\n"
    text = text if heading in text else f"{text.rstrip()}\n{heading}"
    return text.replace(heading, f"{heading}{key} = {value}\n")


class Run:
    """A running command of ``mosaic retrain``; its output so far is in ``lines``."""

    def __init__(self, day: DayFolder, command: list[str], say: Say, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._day, self._say, self._is_killed = day, say, False
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

    def kill(self, *, launcher: bool, workers: bool) -> None:
        """Kills the launcher, whose workers end by themselves; the workers, as without memory; or all at once."""
        pids = self._workers() if workers else ()
        if launcher:
            self._is_killed, pids = True, (self._child.pid, *pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if launcher:
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
        try:
            children = Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children").read_text(encoding="ascii")
        except OSError:
            return ()
        return tuple(map(int, children.split()))

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
            if self._child.poll() is not None:
                code = self.wait()  # for its last lines
                raise MosaicError(f"the run ended with {code} before {what} came; see what it printed above")
            if monotonic() > until:
                self.kill(launcher=True, workers=True)
                raise MosaicError(f"the run took more than {PATIENCE_S:.0f} s before {what} came; see the lines above")
            sleep(0.005)
