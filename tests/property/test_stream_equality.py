"""Random models, plans and loops on streams: equal to plain training, and every launch ordered after what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from engine_cases import SIDE_BY_SIDE, Glued, Record, assert_same, pair_batch
from random_models import Recipe, for_recipes, is_alone, pair_of, train_on_streams
from stream_cases import FakeBackend, colocated, run_both
from torch import nn

from mosaic.engine import Handle


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
    beside = []

    @contextmanager
    def watched(*args: Any, **choice: Any) -> Iterator[tuple[Handle, FakeBackend]]:
        with colocated(*args, **choice) as opened:
            yield opened
            beside.append(is_side_by_side(*opened))

    train_on_streams(recipe, watched)
    return all(beside) and len(beside) > 0


def test_training_on_streams_is_equal_to_plain_training_free_of_races_and_side_by_side_in_half_of_the_recipes():
    beside: list[bool] = []
    for_recipes(lambda recipe: beside.append(check(recipe)), 5)
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
