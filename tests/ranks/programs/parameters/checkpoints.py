"""Saving and loading on several ranks, for the tests of checkpoints: each is called on every rank of a gloo group."""

from __future__ import annotations

import copy
import random
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic import colocate
from mosaic.backends.host.backend import HostBackend
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.engine import find_modules
from mosaic.engine.handle import Handle
from mosaic.engine.options import Options
from mosaic.errors import MosaicError
from mosaic.plan import Plan
from ranks.graphs import Drawn, Shape, batch_of, loss_of, plan_of, subsets

STEPS = 3
SEEDS = range(2)


class Kept(Drawn):
    """A random model with a buffer, a weight of another dtype that never trains, and two names for one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__(Shape.draw(random.Random(seed)))
        self.text.register_buffer("seen_steps", torch.arange(seed + 3))
        self.unused = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.again = nn.Module()
        self.again.mix = self.mix


def optimizer_of(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    half = len(trained) // 2
    groups = [{"params": trained[:half]}, {"params": trained[half:], "lr": 0.02}]
    if seed % 2:
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def draw_plan(model: Drawn, sample: Any, size: int, draw: random.Random) -> Plan:
    """Draws subsets of ranks: equal, disjoint, nested or partly overlapping, as it comes."""
    shares = {"may_share": True} if size > 1 else {}
    graph = find_modules(model, sample, include=model.placed, **shares).graph
    kind = draw.choice(["equal", "disjoint", "nested", "overlapping", "any", "all"])
    return plan_of(graph, subsets(kind, list(graph.topological_order()), size, draw), size)


class Run:
    """One colocated loop."""

    def __init__(self, seed: int, rank: int, size: int, plan_seed: int) -> None:
        torch.manual_seed(1000 * plan_seed + rank)
        self.model = Kept(seed)
        self.rank, self.size = rank, size
        sample = batch_of(self.model.shape, 0, [3] * size, rank)
        plan = draw_plan(self.model, sample, size, random.Random(plan_seed))
        self.optimizer = optimizer_of(self.model, seed)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.handle: Handle = colocate(
            self.model,
            sample=sample,
            modules=self.model.placed,
            plan=plan,
            backend=HostBackend(1),
            options=Options(trial="auto" if size > 1 else None),
        )
        self.average = copy.deepcopy(self.model)
        self.own = torch.Generator().manual_seed(rank)

    def train(self, begin: int, end: int) -> None:
        """Trains on the same global batches whatever the number of ranks."""
        rows = [4 // self.size] * self.size
        for step in range(begin, end):
            loss_of(self.model(*batch_of(self.model.shape, step, rows, self.rank))).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            torch.rand(1, generator=self.own)
            with torch.no_grad():
                for ours, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    ours.lerp_(theirs, 0.5)

    @property
    def belongings(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "companions": {"average": self.average},
            "generators": {"own": self.own},
        }

    def save(self, folder: Path, step: int, **more: Any) -> Path:
        extra = {"seen": step, "shapes": (1, 2), "rank": self.rank}
        return self.handle.save(folder, step=step, **self.belongings, extra=extra, **more)

    def load(self, folder: Path, **more: Any) -> Any:
        return self.handle.load(folder, **self.belongings, **more)


def saving(rank: int, size: int, folder: str) -> None:
    """Trains, saves while training goes on, and saves again at the end."""
    for seed in SEEDS:
        run = Run(seed, rank, size, plan_seed=seed)
        run.train(0, STEPS)
        run.save(Path(folder) / f"run{seed}", STEPS)
        run.handle.export(Path(folder) / f"start{seed}.safetensors")
        run.train(STEPS, 2 * STEPS)
        run.save(Path(folder) / f"run{seed}", 2 * STEPS)
        run.handle.export(Path(folder) / f"end{seed}.safetensors")
        run.handle.remove()


def going_on(rank: int, size: int, folder: str, source: str) -> bool:
    """Loads what other ranks saved under another plan, saves it again as it is, and goes on from it."""
    for seed in SEEDS:
        run = Run(seed, rank, size, plan_seed=100 * size + seed)
        found = run.load(Path(folder) / source / f"run{seed}", step=STEPS)
        assert (found.step, found.extra) == (STEPS, {"seen": STEPS, "shapes": (1, 2), "rank": 0})
        assert run.scheduler.last_epoch == STEPS
        run.handle.save(
            Path(folder) / source / f"again{seed}on{size}",
            step=STEPS,
            **run.belongings,
            extra=found.extra,
        )
        run.train(STEPS, 2 * STEPS)
        run.handle.export(Path(folder) / source / f"end{seed}on{size}.safetensors")
        run.handle.remove()
    return True


def resumed(rank: int, size: int, folder: str) -> bool:
    """The same plan, ended and begun again from new objects: bit for bit what goes on without an end."""
    first = Run(0, rank, size, plan_seed=5)
    first.train(0, 2)
    first.save(Path(folder), 2)
    first.train(2, 5)
    drawn = torch.rand(2), torch.rand(2, generator=first.own)
    whole, average = first.handle.full_state_dict(), first.handle.full_state_dict(first.average)
    digest = first.handle.digest()
    first.handle.remove()
    second = Run(0, rank, size, plan_seed=5)
    assert second.load(Path(folder)).step == 2
    second.train(2, 5)
    assert torch.equal(torch.rand(2), drawn[0])
    assert torch.equal(torch.rand(2, generator=second.own), drawn[1])
    for name, tensor in second.handle.full_state_dict(second.average).items():
        assert torch.equal(tensor, average[name])
    again = second.handle.full_state_dict()
    second.handle.export(Path(folder) / "weights.safetensors")
    third = Run(0, rank, size, plan_seed=6)
    third.handle.load_weights(Path(folder) / "weights.safetensors")
    loaded = third.handle.full_state_dict()
    plain = Kept(0)
    plain.load_state_dict(whole)
    digests = {digest, second.handle.digest(), third.handle.digest(), Checkpointer(plain).digest()}
    assert len(digests) == 1
    for handle in (second.handle, third.handle):
        handle.remove()
    assert whole.keys() == again.keys() == loaded.keys()
    return all(torch.equal(whole[name], again[name]) and torch.equal(whole[name], loaded[name]) for name in whole)


def refusals(rank: int, size: int, folder: str) -> list[str]:
    """Returns the messages of refused saves and loads on this rank."""
    said = []

    def attempt(call: Any) -> None:
        try:
            call()
        except (MosaicError, ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    run = Run(0, rank, size, plan_seed=1)
    place = Path(folder)
    attempt(lambda: run.save(place, 1 + rank))
    place.mkdir(exist_ok=True)
    run.train(0, 1)
    run.save(place, 1)
    run.handle.finish_saving()
    path = run.save(place, 2)
    run.handle.finish_saving()
    dist.barrier()
    if rank == 0:
        damaged = sorted(path.glob("rank-*"))[-1]
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    attempt(lambda: run.load(place))
    assert run.load(place, fall_back=True).step == 1
    before_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # whose disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before_limit[1]))
    run.save(place, 5)
    attempt(run.handle.remove)
    resource.setrlimit(resource.RLIMIT_FSIZE, before_limit)
    assert not any(parameter.is_meta for parameter in run.model.parameters())
    assert not list(place.glob(".saving*"))
    return said


def on_two_ranks(rank: int, size: int, folder: str) -> tuple[bool, bool, list[str]]:
    """All that is tried on two ranks, in one start of them."""
    place = Path(folder)
    return (
        going_on(rank, size, folder, "four") and going_on(rank, size, folder, "one"),
        resumed(rank, size, str(place / "resumed")),
        refusals(rank, size, str(place / "refused")),
    )
