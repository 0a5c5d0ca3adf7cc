"""Bad input to programs that torchrun started: each function is one rank's program, whose exit code is looked at."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.artifact import save
from mosaic.backends.host.backend import HostBackend
from mosaic.cli.main import run
from mosaic.cli.workload import load_workload
from mosaic.engine import find_modules
from mosaic.ranks.running.prepare import cores_of_rank
from ranks.begun import ROWS, begin, join
from ranks.graphs import in_part, plan_of
from ranks.training import Model, batch, draw_plan


def a_script_with_a_plan_for_more_ranks(rank: int, size: int, place: Path) -> None:
    begin(rank, size, place, plan=draw_plan(Model(), size + 1, random.Random(1)))


def a_script_with_a_plan_for_each_rank(rank: int, size: int, place: Path) -> None:
    begin(rank, size, place, plan=draw_plan(Model(), size, random.Random(rank)))


def a_script_with_batch_norm(rank: int, size: int, place: Path) -> None:
    plain = Model.__init__

    def make(self: Any) -> None:
        plain(self)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

    Model.__init__ = make  # type: ignore[method-assign]
    begin(rank, size, place, plan=None)


class Locked(Model):
    """Hands a lock to a module, which no rank can send to another."""

    def forward(self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor) -> Any:
        return self.image(image, lock=self.lock)


def a_script_with_an_input_that_cannot_be_sent(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    locks = [threading.Lock() for _ in range(rank + 1)]  # ranks are forked alike, and one address would be one lock
    model.lock = locks[rank]
    model.forward = Locked.forward.__get__(model)  # type: ignore[method-assign]
    model(**batch(0, ROWS))


def mosaic_run_with_a_plan_for_more_ranks(rank: int, size: int, place: Path) -> None:
    mosaic_run(rank, size, place, planned_for=size + 1)


def mosaic_run_with_a_plan_for_each_rank(rank: int, size: int, place: Path) -> None:
    mosaic_run(rank, size, place, planned_for=size, alike=False)


def mosaic_run(rank: int, size: int, place: Path, *, planned_for: int, alike: bool = True) -> None:
    """``mosaic run --plan`` with a file of this rank's own, ``alike`` on all ranks or not."""
    join(rank, size, place)
    workload = load_workload("zoo:clip-tiny")
    graph = find_modules(workload.model, workload.sample).graph
    members = in_part([*graph.names][:: -1 if rank and not alike else 1], planned_for)
    path = place / f"plan{rank}.json"
    save(plan_of(graph, members, planned_for, HostBackend(cores=cores_of_rank())), path)
    code = run(["run", "--model", "zoo:clip-tiny", "--plan", str(path), "--steps", "1"])
    sys.stderr.flush()
    os._exit(code)
