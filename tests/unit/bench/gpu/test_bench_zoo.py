"""What is measured of each model on a device of a given memory: it fits, and no part of it weighs more than it did."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch

from bench.gpu.models import zoo
from bench.gpu.models.zoo import MAX_SHIFT, MAX_TILT, NOTES, RATIOS, build, config_of, cut, fit, make_batch, shift, tilt
from bench.gpu.models.zoo_memory import Forward, count_forward, usable_bytes
from mosaic import models
from mosaic.errors import MosaicError

META = torch.device("meta")
H100, H200 = 78 << 30, 139 << 30
SMALLEST = RATIOS[-1]


def forward_of(name: str, config: object, batch: int = 1) -> Forward:
    model, sample = build(name, config=config, device=META), make_batch(name, config=config, batch=batch, device=META)
    return count_forward(model, lambda: model(**sample))


@pytest.mark.parametrize("memory_bytes", [H100, H200])
@pytest.mark.parametrize("name", NOTES)
def test_every_model_fits_and_keeps_the_shares_of_its_parts(name: str, memory_bytes: int):
    made = fit(name, memory_bytes=memory_bytes)
    assert made.needed_bytes <= usable_bytes(memory_bytes) < memory_bytes
    assert made.ratio >= zoo.ENOUGH
    assert made.batch >= (2 if memory_bytes == H100 else 4)
    assert shift(name, made.ratio) <= MAX_SHIFT
    assert tilt(name, made.ratio) <= MAX_TILT
    assert made.config == cut(config_of(name, "paper"), made.ratio)
    assert made.note.startswith(NOTES[name])
    sample = make_batch(name, config=made.config, batch=made.batch, device=META)  # the inputs of Table 2
    assert sample["image"].shape == (made.batch, 3, 512, 512)
    assert sample["text" if "text" in sample else "input_ids"].shape == (made.batch, 2048)


def test_eight_gib_are_too_small_for_a_language_model_of_eight_billion():
    with pytest.raises(MosaicError, match=r"qwen3-vl needs 48 GiB with 1/6 .* 8 GiB, of which 7 can be used: meas"):
        fit("qwen3-vl", memory_bytes=8 << 30)
    with pytest.raises(ValueError, match="batch=0"):
        fit("qwen3-vl", memory_bytes=H100, batch=0)


def test_a_batch_shrinks_before_a_model_is_hardly_itself_any_more():
    small, large = (fit("qwen3-vl", memory_bytes=memory) for memory in (H100, H200))
    assert (small.batch, small.ratio) == (4, Fraction(1, 6))
    assert (large.batch, large.ratio) == (8, Fraction(1, 6))
    assert "vision 4 of 27, language 6 of 36 layers" in small.note
    assert "vision 4 of 27, language 6 of 36 layers" in large.note
    assert small.note.endswith("a batch of 4, since 8 would leave too little of it")
    assert "batch" not in large.note
    least = fit("qwen3-vl", memory_bytes=56 << 30)
    assert (least.batch, least.ratio) == (1, Fraction(1, 6))
    assert "nothing is cut" in fit("clip", memory_bytes=H100).note


@pytest.mark.parametrize("name", NOTES)
def test_a_cut_model_trains_every_parameter_on_ids_that_it_has(name: str):
    larger = {"qwen3-vl": "language", "ctvlm": "small large"}.get(name, "").split()
    config = config_of(name, "tiny")
    for part in larger:  # vocabularies that can be cut
        config = dataclasses.replace(config, **{part: _with_words(getattr(config, part), 256)})
    if name == "qwen3-vl":  # features of its last block, and the last words as placeholders
        vision = dataclasses.replace(config.vision, deepstack=(1,))
        config = dataclasses.replace(config, vision=vision, image_id=254, video_id=255)
    if name == "ofasys":
        config = dataclasses.replace(config, words=256, codes=128, bins=128)
    if name == "unified-io-2":
        config = dataclasses.replace(config, vocabularies=(256, 128, 128))
    config = cut(config, Fraction(1, 2))
    cpu = torch.device("cpu")
    model = build(name, config=config, device=cpu)
    models.loss_of(model(**make_batch(name, config=config, batch=2, device=cpu))).backward()
    assert [path for path, parameter in model.named_parameters() if parameter.grad is None] == []


def _with_words(part: Any, words: int) -> Any:
    if hasattr(part, "language"):
        return dataclasses.replace(part, language=_with_words(part.language, words))
    return dataclasses.replace(part, vocabulary=words)


def test_a_part_that_makes_another_model_is_not_taken():
    """A twelfth of Qwen3-VL would have 2 of 27 and 3 of 36 layers, and mergers as they were."""
    smallest = Fraction(1, 12)
    assert tilt("qwen3-vl", smallest) > MAX_TILT > tilt("qwen3-vl", Fraction(1, 6))
    assert zoo.needed_bytes(zoo.counted("qwen3-vl", smallest), batch=1) < usable_bytes(40 << 30)
    with pytest.raises(MosaicError, match="needs 48 GiB with 1/6"):
        fit("qwen3-vl", memory_bytes=40 << 30)
