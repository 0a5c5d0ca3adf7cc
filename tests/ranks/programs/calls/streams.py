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

from mosaic.engine.options import Options, RankSettings
from mosaic.errors import MosaicError
from mosaic.ranks import RankHandle
from mosaic.ranks.calls.streams import StreamRankExecutor
from mosaic.ranks.colocate import colocate_ranks
from ranks.graphs import plan_for
from ranks.programs.parameters import equality
from ranks.training import Model, batch, loss_of

SIDE_BY_SIDE = {"image": (0,), "text": (1,), "audio": (2,)}
"""Slots of the encoders; the rest is on all three."""


@contextmanager
def colocated(
    model: nn.Module, members: dict[str, tuple[int, ...]], size: int
) -> Iterator[tuple[RankHandle, FakeBackend, FakeNccl]]:
    backend = FakeBackend(num_slots=4)
    nccl = FakeNccl(backend.api)
    slots = {"backend": backend, "slots": lambda name: SIDE_BY_SIDE.get(name, (0, 1, 2))}
    plan = plan_for(model, batch(0, 3), members, size, **slots)
    with backend.api.watching(), nccl.standing_in():
        handle = colocate_ranks(
            model, sample=batch(0, 3), plan=plan, backend=backend, options=Options(ranks=RankSettings(timeout_s=60))
        )
        assert isinstance(handle._executor, StreamRankExecutor)
        yield handle, backend, nccl
        handle.remove()


def observed(rank: int, size: int) -> None:
    """Runs all of it; one start of the ranks serves."""
    for seed in (1, 3, 4, 5):
        layout(seed, rank, size)
    layout(6, rank, size, num_slots=1)
    order_of_launches(rank, size)
    lacking_a_modality(rank, size)
    refused(rank, size)


def layout(seed: int, rank: int, size: int, num_slots: int = 4) -> None:
    """Trains a random graph under a random layout as data-parallel training does."""
    backend = FakeBackend(num_slots=num_slots)

    def place(model: nn.Module, sample: Any, members: dict[str, tuple[int, ...]], size: int) -> RankHandle:
        plan = plan_for(model, sample, members, size, backend=backend)
        options = Options(ranks=RankSettings(timeout_s=60))
        return colocate_ranks(model, sample=sample, modules=list(members), plan=plan, backend=backend, options=options)

    with backend.api.watching(), FakeNccl(backend.api).standing_in():
        equality.case(seed, rank, size, place, routes=num_slots > 1)


APART = {"image": (0,), "text": (1,), "audio": (0, 1), "backbone": (0, 1), "head": (1,)}


def order_of_launches(rank: int, size: int) -> None:
    """Trains a step, rank 0 with a loss of little: all ranks launch the same in one order, on their lanes' streams."""
    model = Model()
    with colocated(model, APART, size) as (handle, backend, nccl):
        runs: Any = handle._executor
        handle.clear_timeline()
        del nccl.issued[:]
        out = model(**batch(rank, 2 + 2 * rank))
        behind = [num_calls_behind(node) for node, _ in out["logits"].grad_fn.next_functions[: len(APART)]]
        unread = {name: value.detach() for name, value in out.items()}
        loss = loss_of(out) if rank else loss_of({**unread, "logits": out["logits"] * 0})
        loss.backward()
        lanes = {name: runs.lanes.lane(slots).stream for name, slots in SIDE_BY_SIDE.items()}
        known = backend.api.main.clock
        groups = {module.group.group_name: name for name, module in runs.routed.items()}
        assert behind == [1, 2, 3, 4, 5], "the backward of a call lies behind those of all later calls"
        joined = all(known.get(stream.handle, 0) >= len(backend.api.on(stream)) for stream in lanes.values())
        assert joined, "the loop's stream waits for lanes at the end of a backward"
        rows = [(groups[i.communicator], i.stream) for i in nccl.issued if i.kind == "all_to_all" and not i.in_backward]
        assert {name for name, _ in rows} >= {"image", "text", "head"}
        assert all(stream == lanes[name].handle for name, stream in rows if name in lanes)
        sums = {launch.stream for launch in nccl.issued if launch.kind == "all_reduce" and launch.in_backward}
        assert lanes["audio"].handle in sums, "the audio tower is on both ranks"
        assert 0 not in sums, "the loop's own stream starts sums only once the backward has ended"
        ran = {f"{span.phase} {span.module}" for span in handle.timeline().spans}
        assert ("backward image" in ran, "forward text" in ran) == (rank == 0, rank == 1)
        assert "has not run on several GPUs" in handle.describe()
        first, second = handle.world.all_gather([(launch.kind, launch.communicator) for launch in nccl.issued])
        both = {group for _, group in first} & {group for _, group in second}
        assert len(both) >= 5
        assert [launch for launch in first if launch[1] in both] == [launch for launch in second if launch[1] in both]


def lacking_a_modality(rank: int, size: int) -> None:
    """Rank 0 has no audio, and ranks other numbers of rows; gradients are those of data-parallel training."""
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(0)
    twin = Model()

    def batch_of(step: int, other: int) -> dict[str, Any]:
        return {**batch(2 * step + other, (3, 2 + 2 * other, 3)[step]), **({} if other else {"audio": None})}

    for step in range(3):
        for other in range(size):
            (loss_of(twin(**batch_of(step, other))) / size).backward()
    with colocated(model, APART, size):
        for step in range(3):
            loss_of(model(**batch_of(step, rank))).backward()
        held = [(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True) if not p.is_meta]
        assert max((p.grad - q.grad).abs().max().item() for p, q in held) < 1e-5


def num_calls_behind(node: Any) -> int:
    """Returns how many routed calls a backward from a token goes through."""
    seen, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen.add(one)
            todo += [following for following, _ in one.next_functions]
    return sum(one.name() == "_NodeBackward" for one in seen)


def refused(rank: int, size: int) -> None:
    """Refuses a gradient asked for by name, and calls that differ."""
    model = Model()
    inputs = batch(rank, 3)
    with colocated(model, APART, size):
        out = model(**inputs)
        wide = {**inputs, "image": inputs["image"].double() if rank else inputs["image"]}
        with pytest.raises(MosaicError, match="all ranks take part in a whole backward"):
            torch.autograd.grad(loss_of(out), [model.mix])
        with pytest.raises(MosaicError, match="'image' is called on different ranks"):
            model(**wide)
