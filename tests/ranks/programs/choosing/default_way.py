"""Two ranks go the default way, with nothing scripted: what each does in the test of it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from one_thread_work import OPTIONS, Chains, chains_batch, train_chains
from torch.nn.parallel import DistributedDataParallel

import mosaic
from ranks.begun import join
from ranks.graphs import difference

ROWS = 2
STEPS = range(5)


def beside_each_other(rank: int, size: int, place: Path) -> None:
    """Profiles, solves, tries and trains; the towers end on slots of their own, wherever these are."""
    join(rank, size, place)
    torch.manual_seed(0)
    model = Chains()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    handle = mosaic.colocate(
        model,
        sample=tuple(x[own] for x in chains_batch(0, size * ROWS)),
        options=replace(OPTIONS, cache="user", trial="auto"),
    )
    described, metrics = handle.describe(), handle.metrics()
    fastest = re.search(r"(\S+) is measured \S+ times as fast as data-parallel", described)
    assert fastest is not None, described
    assert metrics[f"trial_ms/{fastest[1]}"] < metrics["trial_ms/data-parallel"], described
    slots = [set(product(placed.devices, placed.slots)) for placed in handle.plan.placements]
    assert slots[0].isdisjoint(slots[1]), described
    losses, expected = (train_chains(one, STEPS, own) for one in (model, wrapped))
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected))
    assert difference(handle, wrapped) < 1e-6
    metrics = handle.metrics()
    assert metrics["steps"] == len(STEPS)
    assert metrics["calls_in_place"] == 0, described
    ran_here = [name for name in ("left", "right") if f"forward_ms/{name}" in metrics]
    assert metrics["overlap"] > 0 or len(ran_here) == 1, described
    print("done")
