"""Glued models: equal to Hugging Face's LLaVA bit for bit; towers that are there or not; callbacks; freezing."""

from __future__ import annotations

from typing import Any

import glued_models as cases
import pytest
import torch
import transformers
from torch import nn

from mosaic.glue import MultimodalModel, Tower

ORACLES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "clip and llama": (
        transformers.CLIPVisionConfig(**cases.VISION),
        transformers.LlamaConfig(**cases.TEXT),
        transformers.LlamaForCausalLM,
        {"layer": -2, "skips_first": True},
    ),
    "siglip and qwen3": (
        transformers.SiglipVisionConfig(**cases.VISION),
        transformers.Qwen3Config(**cases.TEXT),
        transformers.Qwen3ForCausalLM,
        {"layer": -1, "skips_first": False},
    ),
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_glue_equals_hugging_faces_llava_bit_for_bit(name: str, dtype: torch.dtype):
    vision, text, head, how = ORACLES[name]
    torch.manual_seed(0)
    theirs = cases.llava(
        vision,
        text,
        vision_feature_layer=how["layer"],
        vision_feature_select_strategy="default" if how["skips_first"] else "full",
    ).to(dtype)
    ours = cases.as_glue(theirs, head, **how).to(dtype)
    ids = torch.randint(8, cases.VOCABULARY, (2, 14))
    ids[0, 2:6] = ids[1, 1:5] = ids[1, 7:11] = 7
    pixels = torch.randn(3, 3, 8, 8, dtype=dtype)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    expected = theirs(input_ids=ids, attention_mask=mask, labels=ids, pixel_values=pixels)
    found = ours(input_ids=ids, attention_mask=mask, labels=ids, vision={"pixel_values": pixels})
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    expected.loss.backward()
    found.loss.backward()
    gradients = {key: weight.grad for key, weight in theirs.named_parameters()}
    own = {cases.in_llavas_names(key): weight.grad for key, weight in ours.named_parameters()}
    assert own.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert (own[key] is None) == (gradient is None), key
        assert gradient is None or torch.equal(own[key], gradient), key


@pytest.mark.parametrize(("images", "clips"), [(0, 0), (2, 0), (0, 2)])
def test_a_batch_may_lack_modalities(images: int, clips: int):
    torch.manual_seed(0)
    model = cases.glued()
    given, none = cases.batch(images, clips), cases.batch(1, 1)
    loss = model(**given).loss
    loss.backward()
    empty = {name: {key: value[:0] for key, value in none[name].items()} for name in ("vision", "audio")}
    assert torch.equal(model(**empty | given).loss, loss)
    for name, count in (("vision", images), ("audio", clips)):
        trained = [weight.grad is not None for weight in model.get_submodule(f"{name}.projector").parameters()]
        assert trained == [count > 0] * len(trained)


def test_callbacks_are_called_around_a_tower_as_the_paper_has_them():
    """Images come in tiles, which are encoded together."""

    def after(inputs: dict[str, Any], output: Any) -> torch.Tensor:
        return output.last_hidden_state.unflatten(0, inputs["tiles"].shape[:2]).flatten(1, 2)

    torch.manual_seed(0)
    tower = Tower(
        cases.vision(),
        token=cases.IMAGE,
        before=lambda inputs: {"pixel_values": inputs["tiles"].flatten(0, 1)},
        after=after,
    )
    model = MultimodalModel(language_model=cases.language_model(), vision=tower)
    ids = torch.randint(1, cases.VOCABULARY, (2, 14))
    ids[:, :12] = cases.IMAGE
    tiles = torch.randn(2, 3, 3, 8, 8)
    embedded = model.embed(ids, vision={"tiles": tiles})
    features = tower.projector(tower.model(pixel_values=tiles.flatten(0, 1)).last_hidden_state)
    assert torch.equal(embedded[:, :12], features.view(2, 12, -1))
    assert torch.equal(embedded[:, 12:], model.language_model.get_input_embeddings()(ids[:, 12:]))


def test_a_tower_may_return_items_of_different_lengths():
    torch.manual_seed(0)
    tower = Tower(
        cases.vision(),
        token=cases.IMAGE,
        after=lambda inputs, output: [
            item[:length] for item, length in zip(output.last_hidden_state, inputs["lengths"], strict=True)
        ],
        before=lambda inputs: {"pixel_values": inputs["pixel_values"]},
    )
    model = MultimodalModel(language_model=cases.language_model(), vision=tower)
    ids = torch.randint(1, cases.VOCABULARY, (2, 9))
    ids[0, 1:5] = ids[1, 2:3] = cases.IMAGE
    inputs = {"pixel_values": torch.randn(3, 3, 8, 8), "lengths": [1, 3, 1]}
    assert model(input_ids=ids, vision=inputs).logits.isfinite().all()
    with pytest.raises(
        ValueError, match=r"items of 'vision' have 1, 4, 0 features, unlike the placeholders in rows \(by row 4, 1\)"
    ):
        model(input_ids=ids, vision=inputs | {"lengths": [1, 4, 0]})


def glue_of(**towers: Any) -> MultimodalModel:
    return MultimodalModel(language_model=cases.language_model(), **towers)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


def changed(**more: Any) -> dict[str, Any]:
    return {**cases.batch(), **more}


def with_ids(place: tuple[int, int], token: int) -> dict[str, Any]:
    given = cases.batch()
    given["input_ids"][place] = token
    return given


REFUSED: dict[str, tuple[Any, str]] = {
    "two towers with one token": (
        lambda: glue_of(a=Tower(cases.vision(), token=50), b=Tower(cases.vision(), token=50)),
        r"towers share a token \({'a': 50, 'b': 50}\); use a token of its own for each",
    ),
    "no such projector": (
        lambda: Tower(cases.vision(), projector="resampler", token=50),
        "unknown projector 'resampler'; choose one of: linear, mlp, a module or None",
    ),
    "widths that differ without a projector": (
        lambda: glue_of(vision=Tower(cases.vision(), projector=None, token=50)),
        "'vision' returns features of width 24, but the language model needs 16; use projector='linear' or 'mlp'",
    ),
    "a width that is not known": (
        lambda: glue_of(vision=Tower(nn.Conv2d(3, 24, 4, 4), token=50)),
        r"the width of 'vision' is unknown: .*; pass Tower\(..., width=...\)",
    ),
    "an encoder with a decoder": (
        lambda: MultimodalModel(language_model=t5()),
        "T5ForConditionalGeneration has an encoder for its text; use a decoder-only model",
    ),
    "a language model without embeddings": (
        lambda: MultimodalModel(language_model=nn.Linear(2, 2)),
        r"Linear has no get_input_embeddings\(\); use a language model of transformers, or add the method to yours",
    ),
    "placeholders without inputs": (
        lambda: cases.glued()(**changed(vision=None)),
        r"input_ids have 12 placeholders of 'vision', but the batch has no vision inputs; pass vision=\{...\}, or",
    ),
    "fewer features than placeholders": (
        lambda: cases.glued()(**changed(vision={"pixel_values": torch.randn(2, 3, 8, 8)})),
        r"have 12 placeholders of 'vision' \(by row 8, 4\), its inputs have 8 features; use one placeholder per",
    ),
    "a tower that is not there": (
        lambda: cases.glued()(**changed(visoin={"pixel_values": torch.zeros(1, 3, 8, 8)})),
        "unknown tower 'visoin'; choose one of: vision, audio",
    ),
    "inputs that are no keywords": (
        lambda: cases.glued()(**changed(vision=torch.zeros(3, 3, 8, 8))),
        r"vision=Tensor is not a dict of a model's keywords; pass vision=\{'pixel_values': images\}, or leave it out",
    ),
    "an id beyond the vocabulary": (
        lambda: cases.glued()(**with_ids((1, -1), 49)),
        r"1 of the input_ids are outside the vocabulary of 48 ids, such as 49, .* \(vision 50, audio 51\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_batches_that_do_not_fit_are_refused(name: str):
    make, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        make()
