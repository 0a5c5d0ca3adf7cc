"""Planning anew on several ranks, for its tests: each is called on every rank of a gloo group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.errors import ModuleContractError, MosaicError
from mosaic.plan import Plan
from mosaic.ranks import RankHandle
from mosaic.ranks.colocate import colocate_ranks
from ranks.graphs import plan_for

WIDTH = 6
ROWS = 3

Members = dict[str, tuple[int, ...]]


class Encoders(nn.Module):
    """An encoder with a buffer for each modality that there is, and glue with a weight of its own."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: encoder() for name in names})
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return sum((self.encoders[name](rows) @ self.mix).square().mean() for name, rows in batch.items())


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), Counting(), nn.Tanh(), nn.Linear(8, WIDTH))


def batch_of(model: Encoders, step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(ROWS, WIDTH, generator=generator) for name in model.encoders}


def plan_of(model: Encoders, members: Members, size: int) -> Plan:
    """Returns the plan of a plain copy: stand-ins cannot run."""
    copied = Encoders(*model.encoders)
    return plan_for(
        copied, batch_of(copied, 0, 0), {f"encoders.{name}": ranks for name, ranks in members.items()}, size
    )


class Run:
    """A loop under one plan after another."""

    def __init__(self, rank: int, size: int, members: Members) -> None:
        torch.manual_seed(rank)  # rank 0's weights become those of all
        self.rank, self.size = rank, size
        self.model = Encoders(*members)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.handle: RankHandle = self.colocate(members)

    def colocate(self, members: Members) -> RankHandle:
        plan = plan_of(self.model, members, self.size)
        return colocate_ranks(self.model, sample=batch_of(self.model, 0, self.rank), plan=plan, backend=HostBackend(1))

    def train(self, steps: range) -> None:
        for step in steps:
            for micro in range(2):
                self.model(**batch_of(self.model, 2 * step + micro, self.rank)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def replan(self, members: Members, **options: Any) -> None:
        plan = plan_of(self.model, members, self.size)
        sample = batch_of(self.model, 0, self.rank)
        self.handle.replan(sample, reason="others are there", plan=plan, **{"optimizer": self.optimizer, **options})

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the state of this rank's optimizer by the names of parameters."""
        named = {parameter: name for name, parameter in self.model.named_parameters()}
        return {named[p]: copy.deepcopy(state) for p, state in self.optimizer.state.items() if p in named}

    @property
    def held(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if not parameter.is_meta}


FIRST: Members = {"image": (0,), "text": (1,), "audio": (0, 1)}
SECOND: Members = {"image": (1,), "text": (0, 1), "audio": (0,)}


def as_if_stopped(rank: int, size: int, folder: str) -> None:
    """Planned anew is bit for bit a run that stops, saves, and starts under the other plan."""
    on = Run(rank, size, FIRST)
    on.train(range(3))
    on.replan(SECOND)
    on.train(range(3, 6))

    first = Run(rank, size, FIRST)
    first.train(range(3))
    first.handle.save(Path(folder), step=3, optimizer=first.optimizer)
    first.handle.remove()
    second = Run(rank, size, SECOND)
    assert second.handle.load(Path(folder), optimizer=second.optimizer).step == 3
    second.train(range(3, 6))

    ours, theirs = on.states(), second.states()
    assert ours.keys() == theirs.keys() == on.held
    for name, state in ours.items():
        assert state.keys() == theirs[name].keys()
        assert all(torch.equal(state[key], theirs[name][key]) for key in state), name
    whole, other = on.handle.full_state_dict(), second.handle.full_state_dict()
    assert "planned anew: others are there" in on.handle.describe()
    assert on.handle.metrics()["replans"] == 1
    assert on.handle.world.progress.step == 12
    for run in (on, second):
        run.handle.remove()
    assert whole.keys() == other.keys()
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def coming_and_going(rank: int, size: int) -> None:
    """Modules go and come under plans that move everything, and train as where nothing moves."""
    run = Run(rank, size, FIRST)
    optimizer = run.optimizer
    run.train(range(2))
    twin = Run(rank, size, dict.fromkeys(FIRST, (0, 1)))  # data-parallel training, which moves nothing
    twin.train(range(2))
    groups = []
    text, twins_text = run.model.encoders["text"], twin.model.encoders["text"]
    changes: list[Members] = [
        {"image": (0, 1), "audio": (1,)},
        {"image": (1,), "audio": (0,), "depth": (1,)},
        {"image": (0,), "audio": (0, 1), "depth": (0,), "text": (0,)},
        {"image": (1,), "audio": (0,), "depth": (0, 1), "text": (1,)},
    ]
    for number, members in enumerate(changes):
        for each, known in ((run, text), (twin, twins_text)):
            encoders = each.model.encoders
            if "text" not in members and "text" in encoders:
                del encoders["text"]
            if "depth" in members and "depth" not in encoders:
                torch.manual_seed(5 + rank)
                encoders["depth"] = encoder()
                each.optimizer.add_param_group({"params": encoders["depth"].parameters()})
            if "text" in members and "text" not in encoders:
                encoders["text"] = known
        run.replan(members)
        twin.replan(dict.fromkeys(members, (0, 1)))
        assert run.states().keys() <= run.held
        groups.append(len(dist.distributed_c10d._world.pg_map))
        run.train(range(2 + number, 3 + number))
        twin.train(range(2 + number, 3 + number))
        ours, theirs = run.handle.full_state_dict(), twin.handle.full_state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.allclose(tensor, theirs[name], atol=1e-5), (number, name)
        expected = twin.states()
        assert run.states().keys() == run.held
        for name, state in run.states().items():
            for key, value in state.items():
                assert torch.allclose(value, expected[name][key], atol=1e-5), (number, name, key)
    assert run.optimizer is optimizer
    for each in (run, twin):
        each.handle.remove()
    assert groups[3] <= groups[1] + 2, groups  # communicators do not pile up: another module has two more


def refusals(rank: int, size: int) -> None:
    """What would lose something is refused on all ranks, and changes nothing; a failure ends the handle."""
    run = Run(rank, size, FIRST)

    def refused(kind: type[Exception], reason: str, **options: Any) -> None:
        with pytest.raises(kind, match=reason):
            run.replan(SECOND, **options)

    run.train(range(1))
    refused(ValueError, "needs optimizer=", optimizer=None)
    refused(ModuleContractError, "an AdamW that was not given has stepped parameters of this model", optimizer=())
    loss = run.model(**batch_of(run.model, 0, rank))
    refused(ModuleContractError, "in the middle of a step")
    loss.backward()
    refused(ModuleContractError, "has a gradient, which would not move")
    run.optimizer.zero_grad()
    if rank == 0:
        run.model.encoders["depth"] = encoder()
    with pytest.raises(ModuleContractError, match=r"rank 1 is not that of rank 0: encoders.depth.0.weight"):
        run.handle.replan(reason="rank 0 has another model", optimizer=run.optimizer)
    if rank == 0:
        del run.model.encoders["depth"]
    with pytest.raises(MosaicError) as failed:
        run.handle.replan(reason="nobody has it", modules=["nothing"], optimizer=run.optimizer)
    assert any("this handle is done" in note for note in failed.value.__notes__)
    with pytest.raises(MosaicError, match=r"after remove\(\)"):
        run.handle.replan(reason="again", optimizer=run.optimizer)
    run.handle.remove()


def on_two_ranks(rank: int, size: int, folder: str) -> None:
    """All that is tried on two ranks, in one start of them."""
    torch.set_num_threads(1)
    as_if_stopped(rank, size, folder)
    coming_and_going(rank, size)
    refusals(rank, size)
