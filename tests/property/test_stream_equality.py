"""Random models, plans and loops on streams: equal to plain training, and every launch ordered after what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from engine_cases import Record, assert_same
from hypothesis import HealthCheck, example, given, settings
from stream_cases import run_both
from test_engine_equality import PLAIN, RECIPES, Model, Recipe, batch, loop, stages_of


@contextmanager
def cast_cache(on: bool) -> Iterator[None]:
    """Sets whether autocast keeps cast weights: between modules lanes cannot share them, so sums round elsewhere."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(on)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def assert_races_only(plain: Record, ours: Record) -> None:
    assert len(plain.values) == len(ours.values)


@given(recipe=RECIPES)
@example(recipe=PLAIN)
@example(recipe=dataclasses.replace(PLAIN, kinds=("same", "pair", "record", "dict"), slots=3, glue=("linear",) * 4))
@example(recipe=dataclasses.replace(PLAIN, forwards=3, accumulate=2, again=True, kinds=("repeat", "norm", "dropout")))
@example(recipe=dataclasses.replace(PLAIN, glue=("inplace", "view", "dropout", "mean"), autocast=True))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=False
)
def test_training_on_streams_is_equal_to_plain_training_and_free_of_races(recipe: Recipe):
    exclude = [f"{name}.*" for name in ("encoders.*", "backbone", "heads.*")]
    if not recipe.backbone:
        exclude.append("backbone")
    for cached in (True, False) if recipe.autocast else (True,):
        with cast_cache(cached):
            run_both(
                lambda: Model(recipe),
                batch(recipe, 0),
                stages_of(recipe),
                loop(recipe),
                num_slots=recipe.slots,
                compare=assert_races_only if cached and recipe.autocast else assert_same,
                include=["encoders.*", "backbone", "heads.*"],
                exclude=exclude,
            )
