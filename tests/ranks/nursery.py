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


def run_program(function: str, size: int, folder: Path, *, seconds: float) -> list[Ended]:
    """Runs one program on ranks forked from this process's nursery, and returns how they ended."""
    return run_programs([(function, size, folder)], seconds=seconds)[0]


def run_programs(asked: Sequence[tuple[str, int, Path]], *, seconds: float) -> list[list[Ended]]:
    """Runs programs at the same time, each on ranks of its own; returns for each how its ranks ended.

    A program is ``module:function``, called with rank, number of ranks and folder, which is made.
    """
    nursery = _nursery()
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    programs = [(function, size, str(folder)) for function, size, folder in asked]
    nursery.stdin.write(json.dumps([programs, seconds, {**os.environ, "OMP_NUM_THREADS": "1"}]) + "\n")
    nursery.stdin.flush()
    line = nursery.stdout.readline()
    assert line, f"the nursery has ended with exit code {nursery.wait()}"
    return [[Ended(**rank) for rank in ranks] for ranks in json.loads(line)]


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    nursery = subprocess.Popen(
        [sys.executable, "-m", "ranks.nursery"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(nursery.communicate)  # it ends when nothing more can be asked
    return nursery


def main() -> Callable[[], Any] | None:
    """Serves; in a process that was forked for a rank returns what this is to run."""
    import torch

    torch.set_num_threads(1)
    for module in LOADED:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        programs, seconds, environment = json.loads(line)
        pids: list[list[int]] = []
        for function, size, folder in programs:
            importlib.import_module(function.partition(":")[0])
            assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
            Path(folder).mkdir(exist_ok=True)
            pids.append([])
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    return become(function, rank, size, Path(folder), environment)
                pids[-1].append(pid)
        codes = wait_for([pid for ranks in pids for pid in ranks], seconds)
        answer = [
            [asdict(Ended(codes[pid], (Path(folder) / f"said{rank}").read_text())) for rank, pid in enumerate(ranks)]
            for (_, _, folder), ranks in zip(programs, pids, strict=True)
        ]
        print(json.dumps(answer), flush=True)
    return None


def wait_for(pids: Sequence[int], seconds: float) -> dict[int, int | None]:
    """Returns the exit code of each process; kills those that are left after some seconds."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if pid not in codes]:
        is_over = time.monotonic() > deadline
        for pid in left:
            if is_over:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if is_over else os.WNOHANG)
            if ended:
                codes[pid] = None if is_over else os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return codes


def become(function: str, rank: int, size: int, place: Path, environment: dict[str, str]) -> Callable[[], Any]:
    """Makes this process a rank: its output goes to a file, and it finds the others in another."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    output = os.open(place / f"said{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    module, name = function.split(":")
    if name not in getattr(sys.modules[module], "WHOLE_EXITS", ()):
        leave_early()
    torch.set_num_threads(1)  # torch makes its pool of threads anew after a fork, which no two threads may do at once
    return functools.partial(getattr(sys.modules[module], name), rank, size, place)


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


if __name__ == "__main__":
    run = main()
    if run is not None:
        run()
