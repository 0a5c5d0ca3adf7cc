"""What ranks do in the tests: each function is called on every rank of a gloo group, and returns what is compared."""

from __future__ import annotations

import copy
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mosaic.engine.calls.signature import Arguments, learn
from mosaic.engine.calls.structure import flatten
from mosaic.errors import MosaicError
from mosaic.ranks.calls.exchange import error_of
from mosaic.ranks.calls.passing import ForwardPass
from mosaic.ranks.calls.ranked import Ranked, Template
from mosaic.ranks.parameters.elsewhere import Home, give_up
from mosaic.ranks.parameters.gradients import GradientReducer
from mosaic.ranks.world.progress import SentPhase, Traffic
from mosaic.ranks.world.world import World

SAMPLE = (torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)), {"scale": torch.ones(())}


class Tower(nn.Module):
    """Takes vectors, ids and a scale that is no part of the batch; returns nested results, some without gradients."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.randn(2))
        self.net.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        hidden = (x + self.table(ids)) * scale
        found = self.net(hidden)
        return {"out": found, "more": (found.sum(-1), 3), "best": found.argmax(-1), "nothing": None}


@dataclass
class Case:
    """A random layout and loop."""

    held: list[list[int]]
    members: tuple[int, ...]
    frozen: bool
    plain_input: bool
    seed: int

    @staticmethod
    def draw(seed: int, size: int) -> Case:
        draw = random.Random(seed)
        held = [[draw.randint(0, 4) for _ in range(size)] for _ in range(2)]
        for rows in held:
            rows[draw.randrange(size)] += 1
        members = tuple(sorted(draw.sample(range(size), draw.randint(1, size))))
        return Case(held, members, draw.random() < 0.2, draw.random() < 0.3, seed)


def loss_of(result: dict[str, Any], weight: float) -> torch.Tensor:
    return weight * (result["out"].square().sum() + (result["more"][0] * result["best"]).sum() / result["more"][1])


def plain(case: Case, size: int) -> dict[str, torch.Tensor]:
    """What data-parallel training of the whole model computes: gradients are means over the ranks."""
    tower, weight, scale = parts_of(case)
    for step, held in enumerate(case.held):
        x, ids = batch_of(case, step)
        start = 0
        for rank, rows in enumerate(held):
            if rows:
                part = slice(start, start + rows)
                given = x[part] if case.plain_input else x[part] @ weight
                (loss_of(tower(given, ids[part], scale=scale), 1.0 + rank) / size).backward()
            start += rows
    return gradients(tower, weight, scale)


def parts_of(case: Case) -> tuple[Tower, nn.Parameter, nn.Parameter]:
    torch.manual_seed(case.seed)
    return Tower(case.frozen), nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(()) + 0.5)


def batch_of(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    rows = sum(case.held[step])
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 7, (rows,), generator=generator)


def gradients(tower: nn.Module, *more: nn.Parameter) -> dict[str, torch.Tensor]:
    named = {**dict(tower.named_parameters()), **{f"more{index}": p for index, p in enumerate(more)}}
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def routed(case: Case, rank: int, size: int) -> dict[str, torch.Tensor]:
    """The same, with the tower on some of the ranks."""
    world = World()
    tower, weight, scale = parts_of(case)
    own, everyone = world.group(case.members), world.group(range(size))
    is_member = rank in case.members
    reducer = GradientReducer(tower.parameters(), own, bucket_bytes=128, waiting=unwatched) if is_member else None
    shared = GradientReducer([weight, scale], everyone, waiting=unwatched)
    ranked = ranked_of(tower, case.members, world, reducer)
    if not is_member:
        give_up(tower, Home("tower", case.members))
        assert all(tensor.is_meta for tensor in tower.parameters())
    for step, held in enumerate(case.held):
        x, ids = batch_of(case, step)
        part = slice(sum(held[:rank]), sum(held[: rank + 1]))
        given = x[part] if case.plain_input else x[part] @ weight
        result = call(ranked, given, ids[part], scale=scale)
        assert result["out"].shape == (held[rank], 3)
        assert result["nothing"] is None
        loss_of(result, 1.0 + rank).backward()
        shared.finish()
        with torch.no_grad():
            again = call(ranked, given, ids[part], scale=scale)
        assert torch.equal(again["out"], result["out"])
    return gradients(tower, weight, scale)


def unwatched(_phase: SentPhase) -> AbstractContextManager[None]:
    return nullcontext()


def ranked_of(tower: Tower, members: tuple[int, ...], world: World, reducer: GradientReducer | None) -> Ranked:
    args, kwargs = SAMPLE
    made, _, learned = learn(lambda: tower(*args, **kwargs), Arguments.take(args, kwargs), tower)
    group = world.group(range(world.size))
    return Ranked(
        name="tower",
        module=tower,
        members=members,
        group=group,
        sample=SAMPLE,
        template=Template.of(made),
        compute=lambda work, phase: work(),
        reducer=reducer,
        traffic=Traffic(),
        waiting=unwatched,
        control=group,
        learned=learned,
        awaited=None,
        batched=(True, True, False),
    )


def call(ranked: Ranked, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = flatten((args, kwargs))
    error = error_of(ranked, spec, leaves)
    return ranked.result_of(
        ForwardPass(ranked, ranked.plain, leaves, is_there=True, attributes="", error=error).go().made
    )


def random_layouts(rank: int, size: int) -> list[Any]:
    """Compares gradients of twenty random layouts with those of the whole model."""
    found: list[Any] = []
    for seed in range(20):
        case = Case.draw(seed, size)
        expected, ours = plain(case, size), routed(case, rank, size)
        wanted = {name: grad for name, grad in expected.items() if rank in case.members or name.startswith("more")}
        assert ours.keys() == wanted.keys(), (case, ours.keys(), wanted.keys())
        for name, grad in ours.items():
            assert torch.allclose(grad, wanted[name], atol=1e-5, rtol=1e-5), (case, name, grad, wanted[name])
        found.append(list(case.members))
    return found


def all_ranks_bit_for_bit(rank: int, size: int) -> bool:
    """Where every rank runs its own slice, nothing is moved or scaled: results are those of the module itself."""
    case = Case([[3] * size] * 2, tuple(range(size)), False, False, 5)
    tower, weight, scale = parts_of(case)
    twin = copy.deepcopy(tower)
    ranked = ranked_of(tower, case.members, World(), None)
    x, ids = batch_of(case, 0)
    part = slice(3 * rank, 3 * rank + 3)
    for run in (partial(call, ranked), twin):
        loss_of(run(x[part] @ weight, ids[part], scale=scale), 1.0).backward()
    return all(torch.equal(a, b) for a, b in zip(gradients(tower).values(), gradients(twin).values(), strict=True))


def agreeing(rank: int, size: int) -> str:
    """Ranks tell each other; an error on one of them is raised on all, with the rank that had it."""
    world = World()
    assert world.broadcast({"rank": rank}) == {"rank": 0}
    assert world.all_gather(rank) == list(range(size))
    with pytest.raises((MosaicError, ValueError)) as raised:
        world.raise_if_any_failed(ValueError("no data") if rank == 1 else None)
    return str(raised.value)
