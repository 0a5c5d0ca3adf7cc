"""Training on several ranks whose lanes are fake streams and whose communicators are fake NCCL: one function a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_streams import FakeNccl
from stream_cases import FakeBackend
from torch import nn

from mosaic.engine import find_modules
from mosaic.engine.options import Options, RankSettings
from mosaic.errors import MosaicError
from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.ranks import RankHandle
from mosaic.ranks.calls.streams import StreamRankExecutor
from mosaic.ranks.colocate import colocate_ranks
from ranks.graphs import plan_for
from ranks.programs.parameters import equality
from ranks.training import Model, batch, loss_of

SIDE_BY_SIDE = {"image": (0,), "text": (1,), "audio": (2,)}


def plan_of(model: nn.Module, backend: FakeBackend, members: dict[str, tuple[int, ...]], size: int) -> Plan:
    """Encoders side by side on slots of their own, the rest on three of them."""
    graph = find_modules(model, batch(0, 3)).graph
    placed = {
        name: Placement(part=Part(module=name), slots=SIDE_BY_SIDE.get(name, (0, 1, 2)), grid=Grid(ranks=members[name]))
        for name in graph.topological_order()
    }
    stages = [tuple(placed[name] for name in SIDE_BY_SIDE), *((placed[n],) for n in placed if n not in SIDE_BY_SIDE)]
    return Plan(
        device=backend.device,
        num_devices=size,
        stages=tuple(Stage(placements=placements) for placements in stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )


@contextmanager
def colocated(
    model: nn.Module, members: dict[str, tuple[int, ...]], size: int
) -> Iterator[tuple[RankHandle, FakeBackend, FakeNccl]]:
    backend = FakeBackend(num_slots=4)
    nccl = FakeNccl(backend.api)
    plan = plan_of(model, backend, members, size)
    with backend.api.watching(), nccl.standing_in():
        handle = colocate_ranks(
            model, sample=batch(0, 3), plan=plan, backend=backend, options=Options(ranks=RankSettings(timeout_s=60))
        )
        assert isinstance(handle._executor, StreamRankExecutor)
        yield handle, backend, nccl
        handle.remove()


def observed(rank: int, size: int) -> dict[str, Any]:
    """Runs all of it; one start of the ranks serves."""
    return {
        "layouts": [layout(seed, rank, size) for seed in (1, 3, 4, 5)],
        "everywhere": layout(6, rank, size, num_slots=1),
        "order": order_of_launches(rank, size),
        "lacking": lacking_a_modality(rank, size),
        "refused": refused(rank, size),
    }


def layout(seed: int, rank: int, size: int, num_slots: int = 4) -> dict[str, Any]:
    """Trains a random graph under a random layout; returns how far it is from data-parallel training."""
    backend = FakeBackend(num_slots=num_slots)

    def place(model: nn.Module, sample: Any, members: dict[str, tuple[int, ...]], size: int) -> RankHandle:
        plan = plan_for(model, sample, members, size, backend=backend)
        options = Options(ranks=RankSettings(timeout_s=60))
        return colocate_ranks(model, sample=sample, modules=list(members), plan=plan, backend=backend, options=options)

    with backend.api.watching(), FakeNccl(backend.api).standing_in():
        return equality.case(seed, rank, size, place)


APART = {"image": (0,), "text": (1,), "audio": (0, 1), "backbone": (0, 1), "head": (1,)}


def order_of_launches(rank: int, size: int) -> dict[str, Any]:
    """Trains a step, rank 0 with a loss of little; returns what was launched, where, and how calls hang together.

    Rank 1 has more rows than rank 0, so that rows travel for every module.
    """
    model = Model()
    with colocated(model, APART, size) as (handle, backend, nccl):
        runs: Any = handle._executor
        runs.route_all()  # as a sampler does that loads other numbers of rows on each rank
        handle.clear_timeline()
        del nccl.issued[:]
        out = model(**batch(rank, 2 + 2 * rank))
        behind = [num_calls_behind(node) for node, _ in out["logits"].grad_fn.next_functions[: len(APART)]]
        loss = loss_of(out) if rank else loss_of({"logits": out["logits"] * 0, "seen": out["seen"].detach()})
        loss.backward()
        lanes = {name: runs.lanes.lane(slots).stream for name, slots in SIDE_BY_SIDE.items()}
        known = backend.api.main.clock
        return {
            "issued": [(one.kind, one.communicator, one.stream, one.in_backward) for one in nccl.issued],
            "groups": {one.group.group_name: name for name, one in runs.routed.items()},
            "lanes": {name: stream.handle for name, stream in lanes.items()},
            "behind": behind,
            "joined": all(known.get(s.handle, 0) >= len(backend.api.on(s)) for s in lanes.values()),
            "spans": sorted({f"{span.phase} {span.module}" for span in handle.timeline().spans}),
            "described": handle.describe(),
        }


def lacking_a_modality(rank: int, size: int) -> float:
    """Rank 0 has no audio, and ranks other numbers of rows; returns how far gradients are from data parallelism."""
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(0)
    twin = Model()

    def batch_of(step: int, other: int) -> dict[str, Any]:
        return {**batch(2 * step + other, (3, 2 + 2 * other, 3)[step]), **({} if other else {"audio": None})}

    for step in range(3):
        for other in range(size):
            (loss_of(twin(**batch_of(step, other))) / size).backward()
    with colocated(model, APART, size) as (handle, _, _):
        for step in range(3):
            if step:  # as a sampler does that loads other numbers of rows on each rank
                handle._executor.route_all()  # type: ignore[union-attr]
            loss_of(model(**batch_of(step, rank))).backward()
        held = [(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True) if not p.is_meta]
        return max((p.grad - q.grad).abs().max().item() for p, q in held)


def num_calls_behind(node: Any) -> int:
    """Returns how many routed calls a backward from a token goes through."""
    seen, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen.add(one)
            todo += [following for following, _ in one.next_functions]
    return sum(one.name() == "_NodeBackward" for one in seen)


def refused(rank: int, size: int) -> list[str]:
    """Returns the messages of refusals: a gradient asked for by name, calls that differ, and devices."""
    model = Model()
    said: list[str] = []
    inputs = batch(rank, 3)
    with colocated(model, APART, size):
        out = model(**inputs)
        wide = {**inputs, "image": inputs["image"].double() if rank else inputs["image"]}
        for attempt in (
            lambda: torch.autograd.grad(loss_of(out), [model.mix]),
            lambda: model(**wide),
        ):
            with pytest.raises(MosaicError) as raised:
                attempt()
            said.append(f"{raised.type.__name__}: {raised.value}")
    return said
