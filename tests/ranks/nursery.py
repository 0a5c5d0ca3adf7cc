"""A process that has loaded torch and forks ranks from itself, so that no rank costs a start-up of its own.

Run as ``python -m ranks.nursery``: each line of its input asks for programs on some ranks each, which run at the same
time, and is answered with a line that says how these ended. A rank ends as any program does: by an error, a signal, or
at the end of its function. One that has not ended after the program's seconds is killed and is said to hang.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOADED = ("torch._dynamo", "torch.distributed.checkpoint", "mosaic.ranks.colocate", "mosaic.checkpoint.checkpointer")
"""Modules that every rank would load for itself otherwise, some at a model's first call."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int | None
    """Exit code, or the negative number of a signal; None for one that was still there at the end."""
    said: str
    """Its standard output and error."""
    seconds: float
    """How long it ran."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function for some ranks."""

    function: str
    """``module:function``, called with rank, number of ranks and folder."""
    size: int
    """Ranks."""
    seconds: float
    """Ranks that run longer are killed."""
    folder: str
    """The folder of their store and files; it is made."""
    environment: dict[str, str]
    """Variables of the environment."""


def run_program(function: str, size: int, folder: Path, *, seconds: float) -> list[Ended]:
    """Runs one program on ranks forked from this process's nursery, and returns how they ended."""
    return run_programs([(function, size, folder)], seconds=seconds)[0]


def run_programs(asked: Sequence[tuple[str, int, Path]], *, seconds: float) -> list[list[Ended]]:
    """Runs programs at the same time, each on ranks of its own; returns for each how its ranks ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    programs = [
        Program(function=function, size=size, seconds=seconds, folder=str(folder), environment=environment)
        for function, size, folder in asked
    ]
    return _nursery().run(programs)


class Nursery:
    """The other side of the process: one for each process that tests."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranks.nursery"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, programs: Sequence[Program]) -> list[list[Ended]]:
        """Runs programs to the end of the last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(program) for program in programs]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the nursery has ended with exit code {self._process.wait()}"
        return [[Ended(**rank) for rank in ranks] for ranks in json.loads(line)]

    def close(self) -> None:
        """Ends the process, which ends when nothing more can be asked."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@functools.cache
def _nursery() -> Nursery:
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def main() -> Callable[[], Any] | None:
    """Serves; in a process that was forked for a rank returns what this is to run."""
    import torch

    torch.set_num_threads(1)
    for module in LOADED:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        running = []
        for program in [Program(**asked) for asked in json.loads(line)]:
            importlib.import_module(program.function.partition(":")[0])
            assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
            Path(program.folder).mkdir(exist_ok=True)
            running.append(Running(program))
            for rank in range(program.size):
                pid = os.fork()
                if pid == 0:
                    return become(program, rank)
                running[-1].pids.append(pid)
        while [each for each in running if not each.has_ended()]:
            time.sleep(0.02)
        print(json.dumps([[asdict(rank) for rank in each.ended()] for each in running]), flush=True)
    return None


def become(program: Program, rank: int) -> Callable[[], Any]:
    """Makes this process a rank: its output goes to a file, and it finds the others in another."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    place = Path(program.folder)
    output = os.open(place / f"said{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.clear()
    os.environ.update(program.environment)
    import torch

    module, function = program.function.split(":")
    if function not in getattr(sys.modules[module], "WHOLE_EXITS", ()):
        leave_early()
    torch.set_num_threads(1)  # torch makes its pool of threads anew after a fork, which no two threads may do at once
    found = getattr(sys.modules[module], function)
    return lambda: found(rank, program.size, place)


def leave_early() -> None:
    """Has this process end after what the program registered for its exit, without tearing down torch."""
    codes: list[int | None] = [0]

    def note(kind: type[BaseException], error: BaseException, trace: object) -> None:
        sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]
        codes[0] = None if kind is KeyboardInterrupt else 1

    def leave() -> None:
        if codes[0] is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])

    sys.excepthook = note
    atexit.register(leave)


class Running:
    """A program that runs; its ranks are killed when its time is over, or when all that are left were stopped."""

    def __init__(self, program: Program) -> None:
        self.pids: list[int] = []
        self._program = program
        self._start = time.monotonic()
        self._ended: dict[int, tuple[int | None, float]] = {}

    def has_ended(self) -> bool:
        """Looks whether ranks have ended; says whether all have."""
        now = time.monotonic() - self._start
        for pid in self._left():
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._ended[pid] = (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), now)
        left = self._left()
        if now >= self._program.seconds or all(is_stopped(pid) for pid in left):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._ended[pid] = (None, self._program.seconds)
        return not self._left()

    def ended(self) -> list[Ended]:
        """Returns how its ranks ended."""
        said = [(Path(self._program.folder) / f"said{rank}").read_text() for rank in range(len(self.pids))]
        return [
            Ended(self._ended[pid][0], what, self._ended[pid][1]) for pid, what in zip(self.pids, said, strict=True)
        ]

    def _left(self) -> list[int]:
        return [pid for pid in self.pids if pid not in self._ended]


def is_stopped(pid: int) -> bool:
    """Returns True if a signal has stopped a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    run = main()
    if run is not None:
        run()
