"""Modules of a glued model on ranks of their own, as specifications say; what is not given is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import glued_models as cases
import pytest
from pipeline_cases import plain

from bench.papers.data_sets import Microbatch
from mosaic.glue import MultimodalModel, Parallel, parallelize
from mosaic.pipelining.cuts import on_own_ranks
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.partition import Request


@pytest.fixture(scope="module")
def model() -> MultimodalModel:
    return cases.glued()


def request_for(num_ranks: int, *names: str) -> Request:
    """A model with these modules' layers, the language model's taking four times as long."""
    modules = {
        "vision": plain("vision", 6),
        "audio": plain("audio", 4, 0.5),
        "language_model": plain("language_model", 8, 4.0, counts="all"),
    }
    names = names or tuple(modules)
    feeds = tuple(Feed(source=name, target="language_model") for name in names if name != "language_model")
    found = PipelineModel(modules=tuple(modules[name] for name in names), feeds=feeds)
    return Request(model=found, num_ranks=num_ranks, microbatches=[Microbatch(text_tokens=1, images=2)] * 4)


def ranks_of(asked: dict[str, Any], request: Request) -> dict[str, int]:
    return dict(Counter(chunk.parts[0].module for chunk in asked["plan"](request).chunks))


def test_what_is_given_is_kept_and_the_rest_is_found(model: MultimodalModel):
    found = ranks_of(parallelize(model), request_for(8))
    assert found == Counter(chunk.parts[0].module for chunk in on_own_ranks(request_for(8)).chunks)
    specs = {"vision": Parallel(pipeline=3), "audio": Parallel(), "language_model": Parallel()}
    kept = ranks_of(parallelize(model, specs), request_for(8))
    assert kept["vision"] == 3
    assert kept["audio"] == 1
    assert kept["language_model"] == 4
    specs["language_model"] = Parallel(pipeline=2)
    assert ranks_of(parallelize(model, specs), request_for(8))["language_model"] == 2


def specs_with(**more: Parallel) -> dict[str, Parallel]:
    return {name: Parallel(pipeline=1) for name in ("vision", "audio", "language_model")} | more


REFUSED: dict[str, tuple[dict[str, Parallel], str]] = {
    "a name that is missing": (
        {"vision": Parallel(), "language_model": Parallel()},
        r"specs has no Parallel for 'audio'; add 'audio': Parallel\(\) to choose its ranks",
    ),
    "a name that is strange": (
        specs_with(text=Parallel()),
        "unknown module 'text'; choose one of: vision, audio, language_model",
    ),
    "other tensor ranks without pipeline ranks": (
        specs_with(vision=Parallel(tensor=2)),
        r"'vision': 2, 'audio': 1.*'vision' has pipeline=None, .*; set it to a number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specifications_that_do_not_fit_are_refused(model: MultimodalModel, name: str):
    specs, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        parallelize(model, specs)


def test_ranks_that_a_model_cannot_use_are_refused(model: MultimodalModel):
    with pytest.raises(ValueError, match="pipeline=5 for 'audio', which has 4 layers; use 4"):
        parallelize(model, specs_with(audio=Parallel(pipeline=5)))["plan"](request_for(8))
    with pytest.raises(ValueError, match=r"'vision' has no list of layers .* only audio, language_model have one"):
        parallelize(model, specs_with())["plan"](request_for(8, "audio", "language_model"))
    with pytest.raises(
        ValueError, match=r"the modules have 3 ranks together, a replica 4 \(8 ranks, data=2, tensor=1, context=1\)"
    ):
        parallelize(model, specs_with(), data=2)["plan"](request_for(8))
    with pytest.raises(ValueError, match="num_ranks=2; modules on ranks of their own need 3 or more: use more"):
        parallelize(model)["plan"](request_for(2))
