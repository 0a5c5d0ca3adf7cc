"""Random models, plans and loops on streams: equal to plain training, and every launch ordered after what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from engine_cases import SIDE_BY_SIDE, Glued, Record, assert_same, pair_batch
from hypothesis import HealthCheck, example, given, settings
from stream_cases import FakeBackend, colocated, run_both
from test_engine_equality import PLAIN, RECIPES, Model, Recipe, batch, is_alone, loop, pair_of, stages_of
from torch import nn

from mosaic.engine import Handle


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


def is_side_by_side(handle: Handle, backend: FakeBackend) -> bool:
    """Holds that each module ran on its lane; returns whether nothing orders the work of two encoders' lanes."""
    ran = {span.module for span in handle.timeline().spans if span.phase == "forward"}
    assert {name for name in handle.graph.names if not is_alone(handle.plan, name)} <= ran, handle.describe()
    pair = pair_of(handle.plan)
    if pair is None:
        return False
    first, second = ([one for one in backend.launches_of(handle, name) if "mm" in one.name] for name in pair)
    assert any(one.is_concurrent_with(other) for one, other in product(first, second)), handle.describe()
    return True


def check(recipe: Recipe) -> bool:
    """Trains by a recipe both ways; returns whether two encoders ran side by side."""
    exclude = [f"{name}.*" for name in ("encoders.*", "backbone", "heads.*")]
    if not recipe.backbone:
        exclude.append("backbone")
    if not stages_of(recipe):
        return False  # two towers that share a weight, and nothing else to place
    beside = []

    @contextmanager
    def watched(*args: Any, **choice: Any) -> Iterator[tuple[Handle, FakeBackend]]:
        with colocated(*args, **choice) as opened:
            yield opened
            beside.append(is_side_by_side(*opened))

    for kind, cached in ((CastingApart, True), (Model, False)) if recipe.autocast else ((Model, True),):
        with cast_cache(cached):
            run_both(
                lambda kind=kind: kind(recipe),
                batch(recipe, 0),
                stages_of(recipe),
                loop(recipe),
                colocated=watched,
                num_slots=recipe.slots,
                include=["encoders.*", "backbone", "heads.*"],
                exclude=exclude,
            )
    return all(beside)


def test_training_on_streams_is_equal_to_plain_training_free_of_races_and_side_by_side_in_half_of_the_recipes():
    beside = []

    @given(recipe=RECIPES)
    @example(recipe=PLAIN)
    @example(recipe=dataclasses.replace(PLAIN, kinds=("same", "pair", "record", "dict"), slots=3, glue=("linear",) * 4))
    @example(
        recipe=dataclasses.replace(PLAIN, forwards=3, accumulate=2, again=True, kinds=("repeat", "norm", "dropout"))
    )
    @example(recipe=dataclasses.replace(PLAIN, glue=("inplace", "view", "dropout", "mean"), autocast=True))
    @example(
        recipe=dataclasses.replace(PLAIN, kinds=("repeat", "many"), glue=("linear",) * 4, forwards=2, autocast=True)
    )
    @settings(
        max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=False
    )
    def checked(recipe: Recipe) -> None:
        beside.append(check(recipe))

    checked()
    print(f"two encoders ran side by side in {sum(beside)} of {len(beside)} recipes")
    assert sum(beside) >= len(beside) / 2


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
