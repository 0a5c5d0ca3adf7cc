"""Random models and random layouts over ranks, and what DistributedDataParallel makes of the same loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.engine.options import Options, RankSettings
from mosaic.graph import ModuleGraph, Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, TemporalStage
from mosaic.ranks import RankHandle
from mosaic.ranks.colocate import colocate_ranks

WIDTH = 6
WORDS = 9


class Table(nn.Module):
    """Looks ids up; its table may be used by others too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).mean(1))


class Decoder(nn.Module):
    """Returns nested results: what a loss needs, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor, *, gain: torch.Tensor) -> dict[str, Any]:
        logits = self.words(torch.tanh(self.net(x)) * gain)
        return {"logits": logits, "best": logits.argmax(-1), "more": [logits.sum(-1), None]}


@dataclass(frozen=True)
class Shape:
    """The choices behind a random model."""

    depths: tuple[int, ...]
    """Modules in each chain from a vector input."""
    frozen: tuple[bool, ...]
    """For each chain, whether its first module is frozen."""
    num_decoders: int
    sums: bool
    """True: results of chains are added up; False: a module fuses them."""
    tie: str
    """How the table is tied: "none", "head" (to a decoder), "glue" (looked up between modules), or "both"."""

    @staticmethod
    def draw(draw: random.Random) -> Shape:
        depths = tuple(draw.randint(1, 2) for _ in range(draw.randint(1, 2)))
        return Shape(
            depths=depths,
            frozen=tuple(draw.random() < 0.3 for _ in depths),
            num_decoders=draw.randint(1, 2),
            sums=draw.random() < 0.4,
            tie=draw.choice(["none", "head", "glue", "both"]),
        )


class Drawn(nn.Module):
    """A random graph: chains from each input, glue with parameters of its own, a fusion, and decoders."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.chains = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))
            for depth in shape.depths
        )
        self.text = Table()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.gain = nn.Parameter(torch.tensor(0.8))
        wide = WIDTH * (len(shape.depths) + 1)
        self.fusion = None if shape.sums else nn.Sequential(nn.Linear(wide, 2 * WIDTH), nn.GELU(), nn.Linear(12, WIDTH))
        self.decoders = nn.ModuleList(Decoder() for _ in range(shape.num_decoders))
        for chain, frozen in zip(self.chains, shape.frozen, strict=True):
            chain[0].requires_grad_(not frozen)
        if shape.tie in ("head", "both"):
            self.decoders[0].words.weight = self.text.table.weight

    @property
    def placed(self) -> list[str]:
        """Names of the modules to place."""
        chains = [f"chains.{i}.{j}" for i, depth in enumerate(self.shape.depths) for j in range(depth)]
        fusion = [] if self.fusion is None else ["fusion"]
        return [*chains, "text", *fusion, *(f"decoders.{i}" for i in range(self.shape.num_decoders))]

    def forward(self, ids: torch.Tensor, *vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = []
        for chain, x in zip(self.chains, vectors, strict=True):
            for index, module in enumerate(chain):
                x = module(x) if index == 0 else module(x) + x
            seen.append(x @ self.mix)
        read = self.text(ids)
        if self.shape.tie in ("glue", "both"):
            read = read + functional.embedding(ids[:, 0], self.text.table.weight)
        seen.append(read)
        x = sum(seen) if self.fusion is None else self.fusion(torch.cat(seen, dim=-1))
        out = {"x": x}
        for index, decoder in enumerate(self.decoders):
            made = decoder(x * (index + 1), gain=self.gain)
            out[f"logits{index}"] = made["logits"] + 0.1 * made["more"][0][:, None]
        return out


def batch_of(shape: Shape, step: int, rows: list[int], rank: int) -> tuple[torch.Tensor, ...]:
    """Returns a rank's rows of a global batch."""
    generator = torch.Generator().manual_seed(step)
    total = sum(rows)
    whole = [torch.randint(0, WORDS, (total, 4), generator=generator)]
    whole += [torch.randn(total, WIDTH, generator=generator) for _ in shape.depths]
    part = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    return tuple(tensor[part] for tensor in whole)


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns a mean over the rows of this rank."""
    return sum((value.square().mean() for value in out.values()), torch.zeros(()))


def subsets(kind: str, names: list[str], size: int, draw: random.Random) -> dict[str, tuple[int, ...]]:
    """Draws the ranks of each module: ``equal``, ``disjoint``, ``nested``, ``overlapping``, ``all`` or ``any``."""
    everyone = list(range(size))
    if kind == "all":
        return dict.fromkeys(names, tuple(everyone))
    if kind == "equal":
        one = tuple(sorted(draw.sample(everyone, max(1, size - 1))))
        return dict.fromkeys(names, one)
    if kind == "disjoint":
        cut = draw.randint(1, size - 1) if size > 1 else 1
        halves = [tuple(everyone[:cut]), tuple(everyone[cut:]) or (0,)]
        return {name: halves[index % 2] for index, name in enumerate(names)}
    if kind == "nested":
        return {name: tuple(everyone[: draw.randint(1, size)]) for name in names}
    if kind == "overlapping":
        wide = max(1, size // 2 + 1)
        return {name: tuple(sorted((index + k) % size for k in range(wide))) for index, name in enumerate(names)}
    return {name: tuple(sorted(draw.sample(everyone, draw.randint(1, size)))) for name in names}


def in_part(names: Sequence[str], size: int) -> dict[str, tuple[int, ...]]:
    """Returns ranks for each module: of three, sets that overlap in part, one alone and all; of two, all or one."""
    counts = (size - 1, size - 1, 1, size) if size > 2 else (size, 1, 1)
    return {
        name: tuple(sorted((index + step) % size for step in range(counts[index % len(counts)])))
        for index, name in enumerate(names)
    }


def plan_for(model: nn.Module, sample: Any, members: dict[str, tuple[int, ...]], size: int, **more: Any) -> Plan:
    """Returns a plan of a model; the rest is as in ``plan_of``."""
    return plan_of(find_modules(model, sample, include=list(members), may_share=True).graph, members, size, **more)


def plan_of(
    graph: ModuleGraph,
    members: dict[str, tuple[int, ...]],
    size: int,
    *,
    backend: Backend | None = None,
    slots: Callable[[str], tuple[int, ...]] = lambda name: (0,),
) -> Plan:
    """Returns a plan that puts the modules of a graph on ranks, by default each on the first slot of its device."""
    stages = [
        TemporalStage(
            placements=(Placement(part=Part(module=name), slots=slots(name), grid=Grid(ranks=members[name])),)
        )
        for name in graph.topological_order()
    ]
    return Plan(
        device=(backend or HostBackend(1)).device,
        num_devices=size,
        stages=tuple(stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )


def colocated(
    model: nn.Module,
    sample: Any,
    members: dict[str, tuple[int, ...]],
    size: int,
    *,
    num_slots: int = 1,
    **settings: Any,
) -> RankHandle:
    """Colocates a model with its modules on these ranks, each on its device's first slot; ``settings`` of ranks."""
    backend = HostBackend(num_slots)
    plan = plan_for(model, sample, members, size, backend=backend)
    return colocate_ranks(
        model,
        sample=sample,
        modules=list(members),
        plan=plan,
        backend=backend,
        options=Options(ranks=RankSettings(**settings)),
    )


def twins(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, nn.Module]:
    """Returns a model, and the same one in DistributedDataParallel."""
    torch.manual_seed(seed)
    model = make()
    torch.manual_seed(seed)
    return model, DistributedDataParallel(make(), find_unused_parameters=True)


def check_trained(
    make: Callable[[], nn.Module],
    members: dict[str, tuple[int, ...]],
    batch_of: Callable[[int], torch.Tensor],
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> None:
    """Trains a model on two ranks and under DistributedDataParallel, and compares losses and parameters."""
    model, wrapped = twins(make, 0)
    handle = colocated(model, batch_of(0), members, 2)
    losses: tuple[list[float], list[float]] = [], []
    for each, own in zip((model, wrapped), losses, strict=True):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for step in range(4):
            before(each.module if each is wrapped else each, step)
            loss = each(batch_of(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
    assert all(abs(ours - theirs) < 1e-5 * abs(theirs) for ours, theirs in zip(*losses, strict=True))
    assert difference(handle, wrapped) < 1e-5
    handle.remove()


def difference(handle: RankHandle, wrapped: nn.Module) -> float:
    """Returns the largest difference between parameters, relative to each tensor's largest value."""
    ours, theirs = handle.full_state_dict(), wrapped.module.state_dict()
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-3)).item() for name in theirs
    )
