"""Random models with their plans and loops, from a recipe: what colocated and plain training are compared on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from engine_cases import Record, run_both
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from meetings import MeetBothWays, Meeting
from torch import nn
from torch.nn import functional

from bench.sweep.device import device, moved
from mosaic.plan import Plan

WIDTH = 8
ROWS = 5
TOWERS = 9
WAITED_FOR = ("dropout", "inplace", "view")
"""Glue that the caller waits for: it draws random numbers, writes, or may return any shape; none where two meet."""


@dataclass(frozen=True)
class Recipe:
    """The choices behind a random model and loop."""

    kinds: tuple[str, ...]
    frozen: tuple[bool, ...]
    glue: tuple[str, ...]
    merge: str
    backbone: bool
    heads: int
    tied: bool
    unseen: int
    slots: int
    plan: int
    forwards: int
    accumulate: int
    autocast: bool
    clip: bool
    to_none: bool
    evaluate: bool
    again: bool
    adam: bool


RECIPES = st.builds(
    Recipe,
    kinds=st.lists(
        st.sampled_from(["plain", "norm", "dropout", "many", "dict", "record", "pair", "same", "attention", "repeat"]),
        min_size=2,
        max_size=TOWERS,
    ).map(tuple),
    frozen=st.tuples(*[st.booleans()] * TOWERS),
    glue=st.tuples(
        *[st.sampled_from(["none", "normalize", "matmul", "linear", "mean", "dropout", "inplace", "view"])] * TOWERS
    ),
    merge=st.sampled_from(["cat", "stack", "product", "sum"]),
    backbone=st.booleans(),
    heads=st.integers(0, 2),
    tied=st.booleans(),
    unseen=st.integers(-1, 2),
    slots=st.integers(2, 4),
    plan=st.integers(0, 2**16),
    forwards=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    autocast=st.booleans(),
    clip=st.booleans(),
    to_none=st.booleans(),
    evaluate=st.booleans(),
    again=st.booleans(),
    adam=st.booleans(),
)


@dataclass
class Output:
    hidden: torch.Tensor
    nothing: None
    extra: tuple[torch.Tensor, int]


torch.export.register_dataclass(Output)


class Encoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.meeting: Meeting | None = None
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.LayerNorm(WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True) if kind == "attention" else None

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.first(x)).tanh()
        if self.kind == "dropout":
            hidden = functional.dropout(hidden, 0.3, self.training)
        if self.kind == "many":
            hidden = hidden * x + x.sin() * x.mean() - x
        if self.kind == "repeat":
            hidden = self.first(self.first(hidden).relu())
        if self.heads is not None:
            hidden = self.heads(hidden[None], hidden[None], x[None], need_weights=False)[0][0]
        result = self.last(hidden)
        if self.meeting is not None:
            result = MeetBothWays.apply(result, self.meeting)
        if self.kind == "dict":
            return {"hidden": result, "nothing": None, "unused": hidden.sum()}
        if self.kind == "record":
            return Output(result, None, (result.exp(), 3))
        if self.kind == "pair":
            return result, result[:, :2]
        if self.kind == "same":
            return result, x, result
        return result


def unpack(found: Any) -> torch.Tensor:
    if isinstance(found, dict):
        return found["hidden"]
    if dataclasses.is_dataclass(found):
        return found.hidden + found.extra[0] / found.extra[1]
    if isinstance(found, tuple):
        return sum((part.sum(-1, keepdim=True) for part in found[1:]), found[0])
    return found


class Model(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.glue = recipe.glue
        self.stem = nn.Parameter(torch.randn(WIDTH))
        self.encoders = nn.ModuleDict({f"e{index}": Encoder(kind) for index, kind in enumerate(recipe.kinds)})
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.small = nn.Linear(WIDTH, WIDTH, bias=False)
        wide = WIDTH * len(recipe.kinds) if recipe.merge == "cat" else WIDTH
        self.backbone = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide))
        self.heads = nn.ModuleDict({f"h{index}": nn.Sequential(nn.Linear(wide, 16)) for index in range(recipe.heads)})
        for encoder, frozen in zip(self.encoders.values(), recipe.frozen, strict=False):
            encoder.requires_grad_(not frozen)
        if recipe.tied:
            self.encoders["e1"].last.weight = self.encoders["e0"].last.weight

    def _glue(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        if kind == "normalize":
            return functional.normalize(x, dim=-1)
        if kind == "matmul":
            return x @ self.weight.T + x
        if kind == "linear":
            return self.small(x)
        if kind == "mean":
            return x.reshape(ROWS, 2, -1).mean(1).repeat(1, 2) * x
        if kind == "dropout":
            return functional.dropout(x, 0.2, self.training)
        if kind == "inplace":
            x = x * 1
            x += 1
            x[:, 0] = 0
            return x
        if kind == "view":
            return x.view(ROWS, 2, -1).transpose(1, 2).flatten(1)[:, torch.arange(WIDTH - 1, -1, -1, device=x.device)]
        return x

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        shared = [x * self.stem for x in inputs]
        parts = []
        for index, (kind, encoder) in enumerate(zip(self.glue, self.encoders.values(), strict=False)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index != self.recipe.unseen):
                found = unpack(encoder(shared[index]))
            parts.append(self._glue(kind, found))
        merge = self.recipe.merge
        if merge == "cat":
            hidden = torch.cat(parts, dim=-1)
        elif merge == "stack":
            hidden = torch.stack(parts).square().mean(0)
        elif merge == "product":
            hidden = parts[0] @ parts[1].T @ sum(parts[1:])
        else:
            hidden = sum(parts[1:], parts[0])
        if self.recipe.backbone:
            hidden = self.backbone(hidden)
        out = {name: head(hidden * 1.5) + hidden.sum() for name, head in self.heads.items()}
        return {"hidden": hidden, **out}


def batch(recipe: Recipe, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return moved([torch.randn(ROWS, WIDTH, generator=generator) for _ in recipe.kinds])


def stages_of(recipe: Recipe) -> list[dict[str, int]]:
    """Draws a plan: good or bad, with any quotas, modules of the whole device among them."""
    draw = random.Random(recipe.plan)
    names = [f"encoders.e{index}" for index in range(2 if recipe.tied else 0, len(recipe.kinds))]
    heads = [f"heads.h{index}" for index in range(recipe.heads)]
    stages = []
    for level in (names, ["backbone"] * recipe.backbone, heads):
        left = draw.sample(level, len(level))
        while left:
            free, stage = recipe.slots, {}
            while left and free and (not stage or draw.random() < 0.8):
                stage[left.pop()] = quota = draw.choice([1, 1, 1, draw.randint(1, free), free])
                free -= quota
            stages.append(stage)
    return stages


def is_alone(plan: Plan, name: str) -> bool:
    return plan.is_alone(name)


def pair_of(plan: Plan) -> tuple[str, str] | None:
    """Returns two encoders that have to run side by side: called in a row, on disjoint slots."""
    encoders = sorted(placed.module for placed in plan.placements if placed.module.startswith("encoders."))
    for pair in pairwise(encoders):
        first, second = (plan.placement(name).slots for name in pair)
        if set(first).isdisjoint(second) and not any(is_alone(plan, name) for name in pair):
            return pair
    return None


PLACED = ["[eh]*s.*", "backbone"]  # encoders and heads, of which some recipes have none


def excluded(recipe: Recipe) -> list[str]:
    tied = ["encoders.e0", "encoders.e1"] if recipe.tied else []  # which would run in place
    return [*(f"{name}.*" for name in PLACED), *([] if recipe.backbone else ["backbone"]), *tied]


def loss_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(output.float().square().mean() for output in outputs.values())


def loop(recipe: Recipe):
    def run(model: nn.Module, record: Record) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if recipe.adam:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.01)
        else:
            optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        for step in range(3):
            for micro in range(recipe.accumulate):
                with torch.autocast(device().type, torch.bfloat16, enabled=recipe.autocast):
                    seeds = [1000 * step + 10 * micro + index for index in range(recipe.forwards)]
                    losses = [loss_of(model(*batch(recipe, seed))) for seed in seeds]
                loss = sum(losses)
                loss.backward(retain_graph=recipe.again)
                if recipe.again:
                    loss.backward()
                record.note(loss, torch.rand(1, device=device()))
            if recipe.clip:
                record.note(nn.utils.clip_grad_norm_(trained, 0.5))
            record.note_model(model, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=recipe.to_none)
            if recipe.evaluate:
                model.eval()
                with torch.no_grad():
                    record.note(*model(*batch(recipe, step)).values())
                model.train()
        record.note_model(model, optimizer)

    return run


PLAIN = Recipe(
    kinds=("plain", "many"),
    frozen=(False,) * TOWERS,
    glue=("matmul", "matmul") + ("none",) * (TOWERS - 2),
    merge="cat",
    backbone=True,
    heads=2,
    tied=False,
    unseen=-1,
    slots=2,
    plan=1,
    forwards=1,
    accumulate=1,
    autocast=False,
    clip=True,
    to_none=True,
    evaluate=True,
    again=False,
    adam=True,
)


def for_recipes(check: Callable[[Recipe], None], count: int) -> None:
    """Checks examples that were hard, and ``count`` recipes that are drawn."""

    @given(recipe=RECIPES)
    @example(recipe=PLAIN)
    @example(replace(PLAIN, kinds=("same", "pair", "record", "dict"), slots=3, glue=("linear",) * TOWERS))
    @example(replace(PLAIN, forwards=3, accumulate=2, again=True, kinds=("repeat", "norm", "dropout")))
    @example(replace(PLAIN, glue=("inplace", "view", "dropout", "mean"), autocast=True))
    @example(replace(PLAIN, kinds=("repeat", "many"), glue=("linear",) * 4, forwards=2, autocast=True))
    @seed(8)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
    )
    def checked(recipe: Recipe) -> None:
        check(recipe)

    checked()


@contextmanager
def cast_cache(on: bool) -> Iterator[None]:
    """Sets whether autocast keeps cast weights."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(on)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class CastingApart(Model):
    """Casts its own weights at each use, as lanes do that cannot share a cast; its modules keep theirs."""

    def _glue(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        with cast_cache(False):
            return super()._glue(kind, x)


def train_on_streams(recipe: Recipe, colocated: Callable[..., Any], **more: Any) -> None:
    """Compares plain training with that on streams; twice under autocast, whose casts between modules differ."""
    if not stages_of(recipe):
        return  # two towers that share a weight, and nothing else to place
    for kind, cached in ((CastingApart, True), (Model, False)) if recipe.autocast else ((Model, True),):
        with cast_cache(cached):
            run_both(
                partial(kind, recipe),
                batch(recipe, 0),
                stages_of(recipe),
                loop(recipe),
                colocated=colocated,
                num_slots=recipe.slots,
                include=PLACED,
                exclude=excluded(recipe),
                **more,
            )
