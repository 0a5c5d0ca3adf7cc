"""A day on another number of ranks at each start: the same samples, and with ``ranks_exact`` the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import mosaic.retrain.run as launcher
from bench.retrain.small_folder import bits_of, write_recipe
from mosaic.artifact import load
from mosaic.lines import steps_in
from mosaic.retrain.recipe import read_recipe
from mosaic.train.records import Trained

DAY = "2026-11-20"


FAULTS = "    import sys\n    sys.modules['node_faults'].before_loss()\n"
"""Of this process; a process of its own knows nothing of them."""


def run_on_two_ranks(node: Any, *, stop_at: int | None = None, **budget: object) -> int:
    """Runs a folder as a timer would, and tells it to stop once a step is logged."""
    folder = node.folder
    write_recipe(folder.path, budget={"ranks": 2, "micro_batches": 4, **budget})
    command = [sys.executable, "-m", "mosaic.cli", "retrain", "run", str(folder.path)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})  # as in this process
    while child.poll() is None:
        if stop_at is not None and max(steps_in(folder.day(DAY).metrics), default=0) >= stop_at:
            child.send_signal(signal.SIGTERM)
            stop_at = None
        time.sleep(0.005)
    return child.returncode


def test_exact_ranks_give_the_bits_of_one_rank_whatever_their_number_at_each_start(make_node: Callable[..., Any]):
    exact = {"ranks_exact": True, "micro_batches": 4}
    one, several = (make_node(DAY, name=name, budget=exact) for name in ("one", "several"))
    for node in (one, several):
        node.change(FAULTS, "")
    assert one.run() == 0
    assert run_on_two_ranks(several, stop_at=5, ranks_exact=True) == 75
    stopped = max(steps_in(several.folder.day(DAY).metrics))
    write_recipe(several.folder.path, budget=exact)
    assert several.run() == 0
    assert bits_of(several.folder.day(DAY)) == bits_of(one.folder.day(DAY))
    assert load(Trained, several.folder.day(DAY).trained).notes.differs_from_step is None
    (restart,) = several.report.run.restarts
    assert (restart.cause, restart.from_step) == ("SIGTERM", stopped)


def test_the_report_names_the_step_from_which_other_ranks_give_other_bits(make_node: Callable[..., Any]):
    node = make_node(DAY, budget={"micro_batches": 4})
    node.change(FAULTS, "")
    node.change("nn.BatchNorm1d(16)", "nn.LayerNorm(16)")
    assert run_on_two_ranks(node, stop_at=5) == 75
    write_recipe(node.folder.path, budget={"micro_batches": 4})
    assert node.run() == 0
    trained = load(Trained, node.folder.day(DAY).trained)
    assert trained.step == 40
    assert 5 <= (trained.notes.differs_from_step or 0) < 40
    assert "there were 2 ranks and are 1" in trained.notes.differs_because


def test_check_names_what_cannot_be_divided_over_ranks(make_node: Callable[..., Any]):
    node = make_node(DAY, budget={"ranks": 2})
    node.change(FAULTS, "")
    folder = node.folder
    ended = launcher.Workers(folder, folder.day("check"), read_recipe(folder.recipe)).aside("check")
    assert ended.outcome == "failed"
    assert "left.1 is a BatchNorm1d" in ended.reason
    assert "set ranks_exact = true, or ranks = 1" in ended.reason
