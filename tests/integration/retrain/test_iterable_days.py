"""Days whose data can only be gone through: they go on from its own state, with the same bits, or are refused."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.retrain.small_folder import bits_of, write_folder
from mosaic.lines import steps_in
from mosaic.retrain.folder import Folder

DAY = "2026-11-22"
ADDED = """

class Passing(torch.utils.data.IterableDataset):
    '''Rows one after the other, in an order that it draws by itself.'''

    def __init__(self, rows):
        self.rows, self.place = rows, 0

    def __iter__(self):
        while True:
            self.place += 1
            yield self.rows[(self.place * 7) % len(self.rows)]


class Stateful(Passing):
    '''One that can go on.'''

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def passing(folder, train):
    return Stateful(Rows(folder, train)) if train else Rows(folder, train)


def forgetful(folder, train):
    return Passing(Rows(folder, train)) if train else Rows(folder, train)


def slow_loss(model, batch):
    time.sleep(0.01)
    return loss(model, batch)
"""
SOURCES = {"fresh_share": 0.0, "replay": {"share": 0.0}}


def run(folder: Folder, *, stop_at: int | None = None) -> int:
    """Runs a folder as a timer would, and tells it to stop once a step is logged."""
    child = subprocess.Popen([sys.executable, "-m", "mosaic.cli", "retrain", "run", str(folder.path)])
    while child.poll() is None:
        if stop_at is not None and max(steps_in(folder.day(DAY).metrics), default=0) >= stop_at:
            child.send_signal(signal.SIGTERM)
            stop_at = None
        time.sleep(0.02)
    return child.returncode


def folder_of(path: Path, data: str, **sources: object) -> Folder:
    folder = write_folder(path, DAY, data=f"train.py:{data}", loss="train.py:slow_loss", sources={**SOURCES, **sources})
    (path / "train.py").write_text((path / "train.py").read_text() + ADDED)
    return folder


def test_a_day_goes_on_from_the_state_of_its_data_with_the_same_bits(tmp_path: Path):
    undisturbed, stopped = (folder_of(tmp_path / name, "passing") for name in ("undisturbed", "stopped"))
    assert run(undisturbed) == 0
    assert run(stopped, stop_at=12) == 75
    assert run(stopped) == 0
    assert bits_of(stopped.day(DAY)) == bits_of(undisturbed.day(DAY))


@pytest.mark.parametrize(
    ("data", "sources", "said"),
    [
        ("forgetful", {}, "has no state_dict and load_state_dict"),
        ("passing", {"replay": {"share": 0.3}}, "replay has to be { share = 0 }"),
        ("passing", {"fresh_share": 0.1}, "fresh_share has to be 0"),
    ],
)
def test_what_such_data_cannot_do_is_refused_with_the_rule(
    make_node: Callable[..., Any], data: str, sources: dict, said: str
):
    node = make_node(data=f"train.py:{data}", loss="train.py:slow_loss", sources={**SOURCES, **sources})
    program = node.folder.path / "train.py"
    program.write_text(program.read_text() + ADDED)
    assert node.run() == 1
    assert said in node.report.reason
