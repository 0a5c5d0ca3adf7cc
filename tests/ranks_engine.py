"""What ranks do in the tests of their engine; each is called on every rank of a gloo group."""

from __future__ import annotations

import torch
from ranks_training import Model, batch, loss_of

from mosaic.backends.host import HostBackend
from mosaic.engine import find_modules
from mosaic.plan import Placement, Plan, SearchRecord, Stage
from mosaic.ranks.colocate import colocate_ranks


def plan_of(model: torch.nn.Module, members: dict[str, tuple[int, ...]], size: int) -> Plan:
    """Places modules on the ranks that are named for them, all in one stage order, on one slot."""
    graph = find_modules(model, batch(0, 3)).graph
    return Plan(
        device=HostBackend(1).device,
        num_devices=size,
        stages=tuple(
            Stage(placements=(Placement(module=name, slots=(0,), devices=members.get(name, tuple(range(size)))),))
            for name in graph.topological_order()
        ),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )


def bytes_sent(rank: int, size: int) -> dict[str, float]:
    """Trains a step with the image tower on rank 0 alone and counts what was sent for it."""
    torch.manual_seed(0)
    model = Model()
    plan = plan_of(model, {"image": (0,)}, size)
    handle = colocate_ranks(model, sample=batch(0, 3), plan=plan, backend=HostBackend(1))
    loss_of(model(**batch(rank, 3))).backward()
    found = {name: count for name, count in handle.metrics().items() if name.startswith("sent_bytes/")}
    handle.clear_timeline()
    assert not any(name.startswith("sent_bytes/") for name in handle.metrics())
    handle.remove()
    return found
