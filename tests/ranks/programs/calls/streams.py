"""Training on several ranks whose lanes are fake streams and whose communicators are fake NCCL: one function a rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_streams import FakeNccl, RaceError
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
from ranks import training
from ranks.graphs import Drawn, Shape, plan_for
from ranks.graphs import batch_of as drawn_batch
from ranks.graphs import loss_of as drawn_loss
from ranks.training import Model, batch, loss_of, part_of, plain_training, slices

STEPS = 3
SIDE_BY_SIDE = {"image": (0,), "text": (1,), "audio": (2,)}


def draw_members(draw: random.Random, size: int) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(sorted(draw.sample(range(size), draw.randint(1, size))))
        for name in (*SIDE_BY_SIDE, "backbone", "head")
    }


def plan_of(
    model: nn.Module, backend: FakeBackend, members: dict[str, tuple[int, ...]], size: int, *, alone: bool = False
) -> Plan:
    """Encoders side by side on slots of their own, the rest on three of them; or each alone on all four."""
    graph = find_modules(model, batch(0, 3)).graph
    own = {} if alone else SIDE_BY_SIDE
    rest = tuple(range(4 if alone else 3))
    placed = {
        name: Placement(part=Part(module=name), slots=own.get(name, rest), grid=Grid(ranks=members[name]))
        for name in graph.topological_order()
    }
    first = [tuple(placed[name] for name in own)] if own else []
    return Plan(
        device=backend.device,
        num_devices=size,
        stages=tuple(Stage(placements=p) for p in (*first, *((placed[n],) for n in placed if n not in own))),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )


@contextmanager
def colocated(
    model: nn.Module, members: dict[str, tuple[int, ...]], size: int, *, alone: bool = False
) -> Iterator[tuple[RankHandle, FakeBackend, FakeNccl]]:
    backend = FakeBackend(num_slots=4)
    nccl = FakeNccl(backend.api)
    plan = plan_of(model, backend, members, size, alone=alone)
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
        "layouts": [trained(seed, rank, size) for seed in range(3)],
        "everywhere": trained(3, rank, size, everywhere=True),
        "tied": tied(rank, size),
        "order": order_of_launches(rank, size),
        "race": race_without_waiting(rank, size),
        "refused": refused(rank, size),
    }


def trained(seed: int, rank: int, size: int, *, everywhere: bool = False) -> dict[str, tuple[int, ...]]:
    """Trains under a random layout, some ranks without audio, and holds it to data-parallel training."""
    training.STEPS = STEPS
    draw = random.Random(seed)
    rows = [draw.randint(1, 4) for _ in range(size)]
    deaf = [draw.randrange(size)] if seed % 2 else []
    accumulate, clip = (2, 0.05) if seed else (1, 0.0)
    torch.manual_seed(seed + 10 * rank)  # rank 0's weights become those of all
    model = Model()
    torch.manual_seed(seed)
    twin = Model()
    expected = plain_training(twin, rows, deaf, accumulate, clip)[rank::size]
    members = draw_members(draw, size)
    if everywhere:
        members = dict.fromkeys(members, tuple(range(size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with colocated(model, members, size, alone=everywhere) as (handle, _, _):
        for step in range(STEPS):
            for micro in range(accumulate):
                whole = batch(100 * step + micro, sum(rows))
                loss = loss_of(model(**part_of(whole, slices(rows, rank), has_audio=rank not in deaf)))
                loss.backward()
                losses.append(loss.item())
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        found = handle.full_state_dict()
        assert ("nothing is routed" in handle.describe()) == everywhere
        assert handle.timeline().spans
        assert {span.module for span in handle.timeline().spans} <= {n for n, m in members.items() if rank in m}
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-4, rtol=1e-3), (seed, losses, expected)
    for name, tensor in twin.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-4, rtol=1e-3), (seed, name)
    return members


def tied(rank: int, size: int) -> float:
    """A table that a decoder on another rank and the glue use, too: returns how far it is from data-parallel."""
    shape = Shape(depths=(1,), frozen=(False,), num_decoders=1, sums=True, tie="both")
    torch.manual_seed(3)
    model = Drawn(shape)
    torch.manual_seed(3)
    twin = Drawn(shape)
    rows = [2, 3]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]
    backend = FakeBackend(num_slots=4)
    nccl = FakeNccl(backend.api)
    sample = drawn_batch(shape, 0, [3] * size, rank)
    members = {name: {"text": (0,), "decoders.0": (1,)}.get(name, (0, 1)) for name in model.placed}
    plan = plan_for(model, sample, members, size, backend=backend)
    with backend.api.watching(), nccl.standing_in():
        handle = colocate_ranks(model, sample=sample, modules=model.placed, plan=plan, backend=backend)
        for step in range(STEPS):
            drawn_loss(model(*drawn_batch(shape, step, rows, rank))).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        found = handle.full_state_dict()
        handle.remove()
    for step in range(STEPS):
        for other in range(size):
            (drawn_loss(twin(*drawn_batch(shape, step, rows, other))) / size).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return max((found[name] - tensor).abs().max().item() for name, tensor in twin.state_dict().items())


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


def num_calls_behind(node: Any) -> int:
    """Returns how many routed calls a backward from a token goes through."""
    seen, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen.add(one)
            todo += [following for following, _ in one.next_functions]
    return sum(one.name() == "_NodeBackward" for one in seen)


def race_without_waiting(rank: int, size: int) -> str:
    """Were collectives not waited for, the race would be seen: rows are read before they have come.

    All modules are on both ranks, and ranks have rows in other numbers, so that both read what has travelled.
    """
    model = Model()
    with colocated(model, dict.fromkeys(APART, (0, 1)), size) as (handle, _, nccl):
        runs: Any = handle._executor
        runs.route_all()
        nccl.forgets_to_wait = True
        try:
            model(**batch(rank, 2 + 2 * rank))
        except RaceError as error:
            said = str(error)
        else:
            said = "no race"
        nccl.forgets_to_wait = False
        dist.barrier()
        try:
            model(**batch(rank, 2))
        except RaceError as error:
            said += " | " + "; ".join(error.__notes__)
    return said


def refused(rank: int, size: int) -> list[str]:
    """What cannot run: a gradient asked for by name, calls that differ, and devices."""
    model = Model()
    said: list[str] = []
    inputs = batch(rank, 3)
    with colocated(model, APART, size) as (handle, _, _):
        out = model(**inputs)
        wide = {**inputs, "image": inputs["image"].double() if rank else inputs["image"]}
        kinds, one = ("cuda" if rank else "cpu", ""), ("cuda", "the only GPU")
        for attempt in (
            lambda: torch.autograd.grad(loss_of(out), [model.mix]),
            lambda: model(**wide),
            lambda: handle.world.check_devices(kinds),
            lambda: handle.world.check_devices(one),
        ):
            with pytest.raises(MosaicError) as raised:
                attempt()
            said.append(f"{raised.type.__name__}: {raised.value}")
    return said
