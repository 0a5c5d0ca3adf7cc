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
from mosaic.errors import MosaicError
from mosaic.plan import Plan
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.running.prepare import cores_of_rank
from ranks.begun import ROWS, join, watching
from ranks.graphs import in_part, plan_of
from ranks.training import Model, batch, draw_plan


class Locked(Model):
    """Hands a lock to a module, which no rank can send to another."""

    def forward(self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor) -> Any:
        return self.image(image, lock=self.lock)


class Normalized(Model):
    """Has a layer that keeps statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))


def a_script_that_is_refused(rank: int, size: int, place: Path) -> None:
    """Tries again after each refusal, and ends with an input that cannot be sent."""
    join(rank, size, place)

    def start(model: Model, plan: Plan | None) -> None:
        colocate_ranks(model, batch(0, ROWS), plan=plan, backend=HostBackend(1), options=watching())

    for model, plan in (
        (Model(), draw_plan(Model(), size + 1, random.Random(1))),
        (Model(), draw_plan(Model(), size, random.Random(rank))),
        (Normalized(), None),
    ):
        try:
            start(model, plan)
        except MosaicError as error:
            print(error, flush=True)
    model = Model()
    graph = find_modules(model, batch(0, ROWS)).graph
    start(model, plan_of(graph, {name: (0,) if name == "image" else (0, 1) for name in graph.names}, size))
    locks = [threading.Lock() for _ in range(rank + 1)]  # ranks are forked alike, and one address would be one lock
    model.lock = locks[rank]
    model.forward = Locked.forward.__get__(model)  # type: ignore[method-assign]
    model(**batch(0, ROWS))


def mosaic_run_with_a_plan_for_each_rank(rank: int, size: int, place: Path) -> None:
    """``mosaic run --plan`` with a file of this rank's own, which is not that of others."""
    join(rank, size, place)
    workload = load_workload("zoo:clip-tiny")
    graph = find_modules(workload.model, workload.sample).graph
    members = in_part([*graph.names][:: -1 if rank else 1], size)
    path = place / f"plan{rank}.json"
    save(plan_of(graph, members, size, HostBackend(cores=cores_of_rank())), path)
    code = run(["run", "--model", "zoo:clip-tiny", "--plan", str(path), "--steps", "1"])
    sys.stderr.flush()
    os._exit(code)
