"""A process that has loaded torch and forks ranks from itself, so that a case costs no start-up of its own.

Run as ``ranks_nursery.py FOLDER CASE...`` with cases ``module:function:size:seconds``; leaves ``FOLDER/outcomes.json``.
A rank ends as any program does: by an error, a signal, or at the end of its function. One that has not ended after the
case's seconds is killed and is said to hang.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int | None
    """Exit code, or the negative number of a signal; None for one that was still there at the end."""
    said: str
    """What it wrote to standard output and error."""
    seconds: float
    """How long it ran."""


def run_cases(cases: dict[str, tuple[int, float]], folder: Path) -> dict[str, list[Ended]]:
    """Runs ``module:function`` on so many ranks within so many seconds, one case after the other."""
    folder.mkdir(exist_ok=True)
    asked = [f"{name}:{size}:{seconds}" for name, (size, seconds) in cases.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    bound = 60 + sum(seconds for _, seconds in cases.values())
    done = subprocess.run(
        [sys.executable, __file__, str(folder), *asked], env=environment, capture_output=True, text=True, timeout=bound
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads((folder / "outcomes.json").read_text())
    return {name: [Ended(**rank) for rank in ranks] for name, ranks in outcomes.items()}


def main(folder: Path, asked: list[str]) -> None:
    import torch
    import torch._dynamo  # loaded at a model's first call otherwise, by every rank

    torch.set_num_threads(1)
    for module in {case.partition(":")[0] for case in asked}:
        importlib.import_module(module)
    outcomes = {}
    for case in asked:
        name, size, seconds = case.rsplit(":", 2)
        place = folder / name.partition(":")[2]
        place.mkdir()
        pids = []
        for rank in range(int(size)):
            pid = os.fork()
            if pid == 0:
                become(place, rank, int(size), name)()
                return
            pids.append(pid)
        outcomes[name] = [asdict(one) for one in collect(pids, place, float(seconds))]
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def become(place: Path, rank: int, size: int, name: str) -> Callable[[], object]:
    """Makes this process a rank: its output goes to a file, and it finds the others in another."""
    output = os.open(place / f"said{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, function = name.split(":")
    found = getattr(importlib.import_module(module), function)
    if function not in getattr(sys.modules[module], "WHOLE_EXITS", ()):
        leave_early()
    return lambda: found(rank, size, place)


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


def collect(pids: list[int], place: Path, seconds: float) -> list[Ended]:
    """Waits for ranks; kills those that are there when time is over, or that are stopped when all others have ended."""
    start = time.monotonic()
    codes: dict[int, int] = {}
    times: dict[int, float] = {}
    while len(codes) < len(pids) and time.monotonic() - start < seconds:
        left = [pid for pid in pids if pid not in codes]
        for pid in left:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                times[pid] = time.monotonic() - start
        left = [pid for pid in left if pid not in codes]
        if left and all(is_stopped(pid) for pid in left):
            break
        time.sleep(0.02)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [
        Ended(codes.get(pid), (place / f"said{rank}").read_text(), times.get(pid, seconds))
        for rank, pid in enumerate(pids)
    ]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
