"""Every model of the zoo over ranks, its modules on sets that overlap in part, and in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mosaic import models
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.ranks.colocate import colocate_ranks
from ranks.graphs import difference, in_part, plan_of, twins

STEPS = 2
OURS = tuple(name for name, row in models.MODELS.items() if row.workload is not None)
"""Those that are not transformers' own."""
ON_THREE = ("imagebind", "ofasys", "qwen-val")
"""Those with the most modules, the most edges, and three inputs into one; the others run on two ranks."""


def train(name: str, model: nn.Module, rank: int, size: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = models.loss_of(model(**batch_of(name, step, rank, size)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batch_of(name: str, step: int, rank: int, size: int) -> dict[str, Any]:
    return models.make_batch(name, batch=2, seed=size * step + rank)


def zoo(rank: int, size: int) -> dict[str, Any]:
    """Trains those models that belong on so many ranks; returns how far each is from the plain form."""
    found = {}
    for name in OURS:
        if (name in ON_THREE) != (size == 3):
            continue
        model, wrapped = twins(lambda name=name: models.build(name), 0)
        sample = batch_of(name, 0, rank, size)
        graph = find_modules(model, sample, include=models.find_model(name).modules, may_share=True).graph
        members = in_part(graph.names, size)
        handle = colocate_ranks(
            model, sample=sample, modules=graph.names, plan=plan_of(graph, members, size), backend=HostBackend(1)
        )
        ours, theirs = train(name, model, rank, size), train(name, wrapped, rank, size)
        found[name] = {
            "losses": max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)),
            "moved": abs(theirs[0] - theirs[-1]),
            "parameters": difference(handle, wrapped),
            "members": members,
        }
        handle.remove()
    return found
