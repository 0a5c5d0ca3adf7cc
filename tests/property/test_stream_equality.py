"""Random models, plans and loops on streams: equal to plain training, and every launch ordered after what it reads."""

from __future__ import annotations

import dataclasses

import torch
from engine_cases import Record, assert_same
from hypothesis import HealthCheck, example, given, settings
from stream_cases import run_both
from test_engine_equality import PLAIN, RECIPES, Model, Recipe, batch, loop, stages_of


def assert_close(plain: Record, ours: Record) -> None:
    """Under autocast a weight is cast anew on each lane, so its gradients are summed in another precision."""
    assert len(plain.values) == len(ours.values)
    for index, (mine, theirs) in enumerate(zip(ours.values, plain.values, strict=True)):
        assert torch.allclose(mine, theirs, rtol=0.05, atol=0.05, equal_nan=True), f"value {index}"


@given(recipe=RECIPES)
@example(recipe=PLAIN)
@example(recipe=dataclasses.replace(PLAIN, kinds=("same", "pair", "record", "dict"), slots=3, glue=("linear",) * 4))
@example(recipe=dataclasses.replace(PLAIN, forwards=3, accumulate=2, again=True, kinds=("repeat", "norm", "dropout")))
@example(recipe=dataclasses.replace(PLAIN, glue=("inplace", "view", "dropout", "mean"), autocast=True))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=False
)
def test_training_on_streams_is_equal_to_plain_training_and_free_of_races(recipe: Recipe):
    exclude = [f"{name}.*" for name in ("encoders.*", "backbone", "heads.*")]
    if not recipe.backbone:
        exclude.append("backbone")
    run_both(
        lambda: Model(recipe),
        batch(recipe, 0),
        stages_of(recipe),
        loop(recipe),
        num_slots=recipe.slots,
        compare=assert_close if recipe.autocast else assert_same,
        include=["encoders.*", "backbone", "heads.*"],
        exclude=exclude,
    )
