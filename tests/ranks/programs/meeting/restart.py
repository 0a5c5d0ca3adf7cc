"""A training program as a person would give it to torchrun: it goes on from the last checkpoint where it is restarted.

torchrun's agent starts it in processes that are forked from one that has torch loaded; rank KILL_RANK kills itself at
KILL_STEP of its first start.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from ranks.graphs import plan_of
from ranks.training import Model, batch, loss_of

STEPS = 8
ROWS = 3
PLACES = {"image": (0,), "text": (1,), "audio": (0, 1), "backbone": (1,), "head": (0, 1)}


def program(folder: Path, kill_rank: int, kill_step: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    handle = mosaic.colocate(
        model,
        sample=batch(0, ROWS),
        plan=plan_of(find_modules(model, batch(0, ROWS)).graph, PLACES, 2),
        backend=HostBackend(1),
        options=mosaic.Options(ranks=mosaic.RankSettings(timeout_s=120.0, heartbeat_s=0.2)),
    )
    rank = torch.distributed.get_rank()
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaded = handle.load(folder / "run", optimizer=optimizer, missing_ok=True)
    start = loaded.step if loaded is not None else 0
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, STEPS):
        if is_first and (rank, step) == (kill_rank, kill_step):
            os.kill(os.getpid(), 9)
        loss_of(model(**batch(2 * step + rank, ROWS))).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.save(folder / "run", step=step + 1, optimizer=optimizer, keep=2)
    handle.finish_saving()
    handle.export(folder / "model.safetensors")


def restarted(rank: int, size: int, place: Path) -> None:
    """Acts as ``torchrun --nproc-per-node=2 --max-restarts=1``, with a rank that is killed at a random step."""
    draw = random.Random()
    kill_rank, kill_step = draw.randrange(2), draw.randrange(1, STEPS)
    print(f"killed rank {kill_rank} at step {kill_step}", flush=True)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="fork",
    )
    elastic_launch(settings, program)(place, kill_rank, kill_step)
