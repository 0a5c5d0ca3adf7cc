"""Random models, plans and loops on streams: equal to plain training, and every launch ordered after what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from engine_cases import SIDE_BY_SIDE, Glued, Record, assert_same, pair_batch
from hypothesis import HealthCheck, example, given, settings
from stream_cases import run_both
from test_engine_equality import PLAIN, RECIPES, Model, Recipe, batch, loop, stages_of
from torch import nn


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


@given(recipe=RECIPES)
@example(recipe=PLAIN)
@example(recipe=dataclasses.replace(PLAIN, kinds=("same", "pair", "record", "dict"), slots=3, glue=("linear",) * 4))
@example(recipe=dataclasses.replace(PLAIN, forwards=3, accumulate=2, again=True, kinds=("repeat", "norm", "dropout")))
@example(recipe=dataclasses.replace(PLAIN, glue=("inplace", "view", "dropout", "mean"), autocast=True))
@example(recipe=dataclasses.replace(PLAIN, kinds=("repeat", "many"), glue=("linear",) * 4, forwards=2, autocast=True))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=False
)
def test_training_on_streams_is_equal_to_plain_training_and_free_of_races(recipe: Recipe):
    exclude = [f"{name}.*" for name in ("encoders.*", "backbone", "heads.*")]
    if not recipe.backbone:
        exclude.append("backbone")
    if not stages_of(recipe):
        return  # two towers that share a weight, and nothing else to place
    for kind, cached in ((CastingApart, True), (Model, False)) if recipe.autocast else ((Model, True),):
        with cast_cache(cached):
            run_both(
                lambda kind=kind: kind(recipe),
                batch(recipe, 0),
                stages_of(recipe),
                loop(recipe),
                num_slots=recipe.slots,
                include=["encoders.*", "backbone", "heads.*"],
                exclude=exclude,
            )


def test_a_weight_that_several_lanes_cast_has_a_gradient_as_near_as_casts_are():
    def glue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.left(x) @ self.weight) * (self.right(y) @ self.weight)

    def loop(model: nn.Module, record: Record) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*pair_batch()).float().square().mean()
        loss.backward()
        towers = [*model.left.parameters(), *model.right.parameters()]
        record.note(loss, *(parameter.grad for parameter in towers), model.weight.grad)

    def near(plain: Record, ours: Record) -> None:
        (*plains, weight), (*others, other) = plain.values, ours.values
        assert_same(Record(plains), Record(others))
        torch.testing.assert_close(other, weight, rtol=2**-7, atol=2**-7 * float(weight.abs().max()))

    run_both(lambda: Glued(glue), pair_batch(), SIDE_BY_SIDE, loop, compare=near)
