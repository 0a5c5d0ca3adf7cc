"""A training program as a person would give it to torchrun: it goes on from the last checkpoint where it is restarted.

Run as ``ranks_restart.py FOLDER KILL_RANK KILL_STEP``; rank KILL_RANK kills itself at that step of its first start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from ranks_training import Model, batch, loss_of

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.plan import Placement, Plan, SearchRecord, Stage
from mosaic.ranks.meeting.watch import WatchSettings

STEPS = 8
ROWS = 3
PLACES = {"image": (0,), "text": (1,), "audio": (0, 1), "backbone": (1,), "head": (0, 1)}


def plan_for(model: Model) -> Plan:
    from mosaic.engine import find_modules

    graph = find_modules(model, batch(0, ROWS)).graph
    stages = tuple(
        Stage(placements=(Placement(module=name, slots=(0,), devices=PLACES[name]),))
        for name in graph.topological_order()
    )
    device = HostBackend(1).device
    return Plan(
        device=device, num_devices=2, stages=stages, graph=graph.fingerprint, search=SearchRecord(method="manual")
    )


def program(folder: Path, kill_rank: int, kill_step: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    handle = mosaic.colocate(
        model,
        sample=batch(0, ROWS),
        plan=plan_for(model),
        backend=HostBackend(1),
        timeout_s=120.0,
        watch=WatchSettings(beat_s=0.2),
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


if __name__ == "__main__":
    program(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
