"""Days whose data can only be gone through: they go on from its own state, with the same bits, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.retrain.small_folder import bits_of

ADDED = """
import os
import signal
from pathlib import Path

STOP = Path(__file__).with_name("stop")

class Stateful(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows, self.place = rows, 0

    def __iter__(self):
        while True:
            self.place += 1
            if self.place > 200 and STOP.exists():
                STOP.unlink()
                os.kill(os.getpid(), signal.SIGTERM)
            yield self.rows[(self.place * 7) % len(self.rows)]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

def passing(folder, train):
    return Stateful(Rows(folder, train)) if train else Rows(folder, train)
"""


def node_with(make_node: Callable[..., Any], name: str) -> Any:
    sources = {"fresh_share": 0.0, "replay": {"share": 0.0}, "exact": True}
    node = make_node(name=name, data="train.py:passing", sources=sources)
    program: Path = node.folder.path / "train.py"
    program.write_text(program.read_text() + ADDED)
    return node


def test_a_day_that_was_told_to_stop_goes_on_with_the_same_bits(make_node: Callable[..., Any]):
    undisturbed, stopped = (node_with(make_node, name) for name in ("undisturbed", "stopped"))
    assert undisturbed.run() == 0
    (stopped.folder.path / "stop").touch()
    assert stopped.run() == 75
    assert stopped.run() == 0
    assert bits_of(stopped.folder.days()[0]) == bits_of(undisturbed.folder.days()[0])
