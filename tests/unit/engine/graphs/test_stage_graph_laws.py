"""Random stages and loops: by graphs and plainly the numbers are equal bit for bit, and nothing races."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_graph_cases import train_both
from torch import nn

WIDTH = 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mul_(0.5).add_(1).tanh() + x.detach()


class Two(nn.Module):
    """Returns two results, of which the loop uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return hidden, self.second(hidden)


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "deep": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)),
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "residual": Residual,
    "two": Two,
    "identity": nn.Identity,
    "branching": lambda: Branching(),
}


class Branching(nn.Module):
    """Cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.detach().sum()) < 1e9 else x


@dataclass(frozen=True)
class Recipe:
    """What a random stage and loop are made of."""

    kinds: tuple[str, ...]
    frozen: tuple[bool, bool, bool]
    stem: bool
    together: bool
    rows: tuple[int, ...]
    every: int
    none: bool
    max_graphs: int


RECIPES = st.builds(
    Recipe,
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3).map(tuple),
    frozen=st.tuples(*[st.booleans()] * 3),
    stem=st.booleans(),
    together=st.booleans(),
    rows=st.lists(st.integers(2, 3), min_size=1, max_size=3).map(tuple),
    every=st.integers(1, 2),
    none=st.booleans(),
    max_graphs=st.integers(1, 4),
)


class Model(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(KINDS[kind]() for kind in recipe.kinds)
        for part, frozen in zip(self.parts, recipe.frozen, strict=False):
            part.requires_grad_(not frozen)


def step_of(recipe: Recipe) -> Any:
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(recipe.rows[number % len(recipe.rows)], WIDTH, generator=generator)
        late = recipe.together and "branching" in recipe.kinds  # launched after the others, so sums have another order
        shared = model.stem(x) if recipe.stem and not late else x
        calls = {f"part {index}": (part, shared) for index, part in enumerate(model.parts)}
        found = together(**calls) if recipe.together else [together(**{name: calls[name]})[0] for name in calls]
        used = [one[0] if isinstance(one, tuple) else one for one in found]
        product = model.stem(x)
        for one in used:
            product = product * one
        return product.square().mean()

    return step


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=RECIPES)
def test_random_stages_compute_what_plain_code_does(recipe: Recipe):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = {"max_graphs": recipe.max_graphs}
        ours, _ = train_both(
            lambda: Model(recipe), step_of(recipe), options=options, every=recipe.every, none=recipe.none
        )
        assert set(ours.graphs.refused) <= {
            f"part {index}" for index, kind in enumerate(recipe.kinds) if kind == "branching"
        } or "changes from call to call" in str(ours.graphs.refused)
    finally:
        torch.set_num_threads(threads)
