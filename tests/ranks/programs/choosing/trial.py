"""Plans that are tried on several ranks before the loop begins: what ranks do in the tests of it."""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import torch
from planning_cases import flat, profile_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.options import Options, RankSettings
from mosaic.hardware import Link
from mosaic.profile import Profile
from mosaic.ranks import RankHandle
from mosaic.ranks import colocate as trial
from mosaic.ranks import plans as planning
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.session import RANK_TRIAL
from ranks.graphs import difference

ROWS = 2
WIDTH = 5
STEPS = 3
LEFT, RIGHT = "left", "right"


class Tower(nn.Module):
    """Counts its calls, in place and in a new buffer each time, and may do something else at a number of rows.

    It does so once it is placed: not while it is found and profiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.at: dict[int, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.calls * 2
        made = self.drop(torch.tanh(self.net(x)))
        act = self.at.get(len(x)) if type(self) is not Tower else None
        return made if act is None else act(made)


class Towers(nn.Module):
    """Two towers and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.mix = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.mix + self.right(x)


class Script:
    """A clock that says for one step after the other how long it took, turns again and again."""

    def __init__(self, *turns: float) -> None:
        each = RANK_TRIAL.steps_per_visit + RANK_TRIAL.warm_steps
        self.times = cycle(ms for ms in turns for _ in range(each))

    def mark(self) -> None:
        return None

    def ms_between(self, earlier: None, later: None) -> float:
        return next(self.times)

    def settle(self) -> None:
        return None


def measured() -> Profile:
    """Towers that no second rank makes faster: side by side on two ranks they take half as long as in turn."""
    return profile_of({LEFT: flat(10), RIGHT: flat(10)}, num_slots=1, degrees=(1, 2))


def links(*_: Any, **__: Any) -> Link:
    """Says what links there are, as the profile does of modules: on a busy machine measured ones may be any."""
    return Link(latency_us=50.0, gb_per_s=1.0)


def tried(model: nn.Module, *turns: float) -> RankHandle:
    planning.measure_ring = planning.measure_route = links
    script = Script(*turns)
    trial.LoopClock = lambda api: script
    return colocate_ranks(
        model,
        sample=torch.ones(ROWS, WIDTH),
        modules=[LEFT, RIGHT],
        backend=HostBackend(1),
        options=Options(
            profile=measured(),
            trial=RANK_TRIAL,
            ranks=RankSettings(heartbeat_s=0.2, grace_s=1.5, timeout_s=30.0),
        ),
    )


def batch(step: int, rank: int, size: int) -> torch.Tensor:
    whole = torch.randn(ROWS * size, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole.chunk(size)[rank]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
    for step in range(STEPS):
        model(batch(step, rank, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def is_as_data_parallel(handle: RankHandle, model: Towers, rank: int, size: int) -> bool:
    """Trains with an optimizer and a twin of the model in DistributedDataParallel, without dropout."""
    twin = Towers()
    twin.load_state_dict(handle.full_state_dict())
    model.eval()
    twin.eval()
    wrapped = DistributedDataParallel(twin)
    for one in (model, wrapped):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), rank, size)
    return difference(handle, wrapped) < 1e-5


def nothing_left(rank: int, size: int) -> None:
    """The planned plan wins; what the trial found is there bit for bit, and an optimizer made before it trains."""
    torch.manual_seed(7)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.mix.grad = torch.full_like(model.mix, 3.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    gradient, states = model.mix.grad, (torch.get_rng_state(), random.getstate())
    handle = tried(model, 10, 5)
    assert all(torch.equal(handle.full_state_dict()[name], tensor) for name, tensor in before.items() if "." in name)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert model.mix.grad is gradient
    assert torch.equal(gradient, torch.full((WIDTH,), 3.0))
    assert objects == {
        name: id(tensor) if not tensor.is_meta or isinstance(tensor, nn.Parameter) else objects[name]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    assert all(p.grad is None for name, p in model.named_parameters() if name != "mix")
    assert handle.plan.search.method == "exact", handle.describe()
    assert [placed.degree for placed in handle.plan.placements] == [1, 1]
    metrics = handle.metrics()
    assert (metrics["trial_ms/data-parallel"], metrics["trial_ms/exact"]) == (10, 5)
    assert (metrics["trials"], metrics["trial_steps"], metrics["trial_lost_ms"]) == (1, 30, 225)
    assert metrics["steps"] == 0
    said = handle.describe()
    assert "exact is measured 2.00 times as fast as data-parallel (30 steps of the sample before the loop" in said, said
    assert "predicted for modules and what they send: data-parallel 40.00 ms, exact 2" in said, said
    model.mix.grad = None
    weight = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    model(batch(0, rank, size)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(not torch.equal(p, weight[name]) for name, p in model.named_parameters() if not p.is_meta)
    assert is_as_data_parallel(handle, model, rank, size)
    handle.remove()


def slowest_counts(rank: int, size: int) -> None:
    """The planned plan is faster on rank 0 and slower on rank 1: data-parallel training runs, as DDP does."""
    torch.manual_seed(7)
    model = Towers()
    handle = tried(model, 10, 5 if rank == 0 else 12)
    assert handle.plan.search.method == "data-parallel"
    assert [placed.devices for placed in handle.plan.placements] == [(0, 1), (0, 1)]
    assert handle.metrics()["trial_ms/exact"] == 12
    assert "no plan is faster than data-parallel beyond the noise" in handle.describe(), handle.describe()
    assert is_as_data_parallel(handle, model, rank, size)
    handle.remove()


def no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory is left")


class Late(torch.autograd.Function):
    """Runs out of memory in its backward."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor) -> torch.Tensor:
        return made.clone()

    backward = staticmethod(no_memory)


def fails(rank: int, size: int) -> None:
    """One plan in a forward, then the other in a backward, runs out of memory on one rank, while the other waits."""

    outcomes = ((2 * ROWS, no_memory, "data-parallel", "exact"), (ROWS, Late.apply, "exact", "data-parallel"))
    for rows, act, winner, loser in outcomes:
        torch.manual_seed(7)
        model = Towers()
        if rank == 1:
            model.right.at = {rows: act}
        handle = tried(model, 10, 10)
        said = handle.describe()
        assert handle.plan.search.method == winner, said
        assert f"tried {loser}: " in said, said
        assert "could not run: rank 1: OutOfMemoryError: no memory is left" in said, said
        model.right.at = {}
        assert is_as_data_parallel(handle, model, rank, size)
        handle.remove()


def everything(rank: int, size: int) -> None:
    for check in (nothing_left, slowest_counts, fails):
        check(rank, size)
