"""Models and batches that do not fit are refused, each with the way out."""

from __future__ import annotations

from typing import Any

import glued_models as cases
import pytest
import torch
import transformers
from torch import nn

from mosaic.glue import MultimodalModel, Tower


def glue_of(**towers: Any) -> MultimodalModel:
    return MultimodalModel(language_model=cases.language_model(), **towers)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "two towers with one token": (
        lambda: glue_of(a=Tower(cases.vision(), token=50), b=Tower(cases.vision(), token=50)),
        "'a' and 'b' share the token 50; give each tower its own",
    ),
    "no token": (
        lambda: glue_of(vision=Tower(cases.vision())),
        r"'vision' has no token .*; use Tower\(token=...\), or MultimodalModel\(before=...\)",
    ),
    "no tower": (
        lambda: glue_of(vision=cases.vision()),
        r"vision=SiglipVisionModel is not a Tower; use vision=Tower\(model, token=...\)",
    ),
    "a name that is taken": (
        lambda: glue_of(forward=Tower(cases.vision(), token=50)),
        "a tower cannot have the name 'forward', which the model has already; choose another",
    ),
    "no such projector": (
        lambda: Tower(cases.vision(), projector="resampler"),
        "unknown projector 'resampler'; choose one of: linear, mlp, or use a module or None",
    ),
    "widths that differ without a projector": (
        lambda: glue_of(vision=Tower(cases.vision(), projector=None, token=50)),
        "'vision' returns features of width 24, the language model takes 16; use projector='linear' or 'mlp'",
    ),
    "a width that is not known": (
        lambda: glue_of(vision=Tower(nn.Conv2d(3, 24, 4, 4), token=50)),
        r"the width of 'vision' is unknown: .*; pass Tower\(..., width=...\)",
    ),
    "an encoder with a decoder as a tower": (
        lambda: Tower(t5()),
        r"T5ForConditionalGeneration is an encoder with a decoder, not a tower: .* such as model.get_encoder\(\)",
    ),
    "an encoder with a decoder as the language model": (
        lambda: MultimodalModel(language_model=t5()),
        "T5ForConditionalGeneration is an encoder with a decoder, not a language model",
    ),
    "a language model without embeddings": (
        lambda: MultimodalModel(language_model=nn.Linear(2, 2)),
        r"Linear has no get_input_embeddings\(\); use a language model of transformers, or add the method to yours",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_fit_are_refused(name: str):
    make, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        make()


def changed(**more: Any) -> dict[str, Any]:
    return {**cases.batch(), **more}


def with_ids(place: tuple[int, int], token: int) -> dict[str, Any]:
    given = cases.batch()
    given["input_ids"][place] = token
    return given


CALLS: dict[str, tuple[Any, str]] = {
    "placeholders without inputs": (
        lambda: changed(vision=None),
        r"input_ids hold 12 placeholders of 'vision' and the batch has no vision inputs; give vision=\{...\}, or",
    ),
    "fewer features than placeholders": (
        lambda: changed(vision={"pixel_values": torch.randn(2, 3, 8, 8)}),
        r"hold 12 placeholders of 'vision' \(by row 8, 4\), its inputs give 8 features; put one placeholder into the",
    ),
    "more features than placeholders": (
        lambda: with_ids((0, 1), 3),
        r"hold 11 placeholders of 'vision' \(by row 7, 4\), its inputs give 12 features; .* check that no text was cut",
    ),
    "an item in two rows": (
        lambda: with_ids((0, 1), 3) | {"input_ids": moved()},
        r"item 1 of 'vision' has 4 features and row 0 of input_ids 3 placeholders left for it \(by row 7, 5\)",
    ),
    "a tower that is not there": (
        lambda: changed(visoin={"pixel_values": torch.zeros(1, 3, 8, 8)}),
        "there is no tower 'visoin'; this model has vision, audio",
    ),
    "inputs that are no keywords": (
        lambda: changed(vision=torch.zeros(3, 3, 8, 8)),
        r"vision=Tensor is not the keywords of a model; give vision=\{'pixel_values': images\}, or leave it out",
    ),
    "an id beyond the vocabulary": (
        lambda: with_ids((1, -1), 49),
        r"1 of the input_ids are not among the 48 ids of the vocabulary, such as 49, .* \(vision 50, audio 51\)",
    ),
    "placeholders to predict": (
        lambda: changed(labels=torch.full((2, 23), cases.IMAGE)),
        r"labels hold 46 placeholders of 'vision' \(id 50\), which is beyond the vocabulary; set labels to -100 there",
    ),
}


def moved() -> torch.Tensor:
    """Ids in which one placeholder of the first row stands in the second."""
    ids = cases.batch()["input_ids"]
    ids[0, 1], ids[1, -1] = 3, cases.IMAGE
    return ids


@pytest.mark.parametrize("name", CALLS)
def test_batches_that_do_not_fit_are_refused(name: str):
    make, match = CALLS[name]
    with pytest.raises(ValueError, match=match):
        cases.glued()(**make())
