"""``mosaic retrain run`` in this process: the launcher's part, and the worker's where a process would be started."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mosaic.retrain.day as launcher
from bench.retrain.small_folder import bits_of, write_folder
from mosaic.artifact import load
from mosaic.retrain import workers
from mosaic.retrain.folder import Folder
from mosaic.retrain.report import DayReport
from mosaic.retrain.worker import main as worker

FIRST = "2026-11-20"
TESTS = Path(__file__).parents[2]


def run_script(name: str, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Runs a script of ``cases/retraining``, which forks, in a process of its own; returns its output and its JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "cases" / "retraining" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Inside:
    """Stands in for ``subprocess.Popen`` in ``Workers``: runs the worker at once, here."""

    pid = 0

    def __init__(self, command: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", command[3:])
            with pytest.raises(SystemExit) as ended:
                worker.main()
        self.returncode = int(ended.value.code or 0)

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def terminate(self) -> None:
        pass


LOSS = "def loss(model, batch):\n"
FAULTS = "    import sys\n    sys.modules['node_faults'].before_loss()\n"


@dataclass
class Node:
    """A folder, and what its runs say."""

    folder: Folder
    said: list[str] = field(default_factory=list)

    def run(self, offset: timedelta = timedelta(), *, at_step: int = 0, fault: Callable[[], object] = int) -> int:
        """Runs; returns the exit code.

        Args:
            offset: Added to the time.
            at_step: Of this run, counted from 1, before which there is a fault.
            fault: What happens then.
        """
        calls = itertools.count()
        module = ModuleType("node_faults")
        module.before_loss = lambda: next(calls) == 2 * (at_step - 1) and fault()  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "node_faults", module)
            return launcher.run(self.folder.path, self.said.append, offset)

    def stop(self) -> None:
        """Tells the worker to stop; a fault."""
        os.kill(os.getpid(), signal.SIGTERM)

    def change(self, before: str, after: str) -> None:
        """Edits the user's program."""
        path = self.folder.path / "train.py"
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    @property
    def report(self) -> DayReport:
        """Of the last day; its page was written too."""
        day = self.folder.days()[-1]
        assert day.page.is_file()
        return load(DayReport, day.report)


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Makes folders as ``write_folder`` does, each with a day of data."""
    monkeypatch.setattr(workers.Workers, "_start", lambda self, command, more: Inside(command))
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.benchmark
    torch.set_num_threads(1)

    def make(*days: str, name: str = "node", **changed: object) -> Node:
        changed["budget"] = {"save": "0.3s", **changed.get("budget", {})}  # type: ignore[dict-item]
        node = Node(write_folder(tmp_path / name, *(days or (FIRST,)), **changed))
        node.change(LOSS, LOSS + FAULTS)
        return node

    yield make
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.benchmark = cudnn


@pytest.fixture
def quiet(make_node: Callable[..., Node]) -> dict[str, object]:
    """Bits of an undisturbed day."""
    node = make_node(name="quiet")
    assert node.run() == 0
    return bits_of(node.folder.days()[-1])
