"""What is measured of each model on a device of a given memory: it fits, and no part of it weighs more than it did."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from bench.gpu.models import zoo
from bench.gpu.models.zoo import MAX_SHIFT, NOTES, RATIOS, build, config_of, counted, cut, fit, make_batch, shift
from bench.gpu.models.zoo_memory import TEMPORARIES, Forward, count_forward, needed_bytes, shift_of, usable_bytes
from torch import nn

from mosaic import models
from mosaic.cost.analytic import count_module
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
    assert made.batch >= (2 if memory_bytes == H100 else 8)
    assert shift(name, made.ratio) <= MAX_SHIFT
    assert made.config == cut(config_of(name, "paper"), made.ratio)
    assert made.note.startswith(NOTES[name])
    sample = make_batch(name, config=made.config, batch=made.batch, device=META)  # the inputs of Table 2
    assert sample["image"].shape == (made.batch, 3, 512, 512)
    assert sample["text" if "text" in sample else "input_ids"].shape == (made.batch, 2048)


@pytest.mark.parametrize("name", NOTES)
def test_a_device_far_too_small_is_told_what_a_model_takes(name: str):
    with pytest.raises(MosaicError, match=rf"{name} needs \d+ GiB with 1/\d+ of its layers .* has 2 GiB"):
        fit(name, memory_bytes=2 << 30)


def test_eight_gib_are_too_small_for_a_language_model_of_eight_billion():
    with pytest.raises(MosaicError, match=r"qwen3-vl needs 28 GiB with 1/12 .* 8 GiB, of which 7 can be used: meas"):
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
    least = fit("qwen3-vl", memory_bytes=40 << 30)
    assert (least.batch, least.ratio) == (2, Fraction(1, 12))
    assert "nothing is cut" in fit("clip", memory_bytes=H100).note


def test_a_model_of_which_one_side_alone_is_cut_has_other_shares():
    whole = config_of("qwen3-vl", "paper")
    shape = dataclasses.replace(whole.language.shape, layers=4)
    lopsided = dataclasses.replace(whole, language=dataclasses.replace(whole.language, shape=shape))
    uncut, even = (counted("qwen3-vl", ratio) for ratio in (RATIOS[0], Fraction(1, 6)))
    assert shift_of(uncut, forward_of("qwen3-vl", lopsided)) > 0.2
    language = [forward.shares["language_model.stack"] for forward in (uncut, even)]
    assert language[0] > 0.8
    assert language[1] == pytest.approx(language[0], abs=MAX_SHIFT)


def test_a_share_that_moves_is_counted_once():
    def forward(**flops: float) -> Forward:
        return Forward(parameters=1, cast_bytes=0, kept_bytes=0, largest_bytes=0, flops=flops)

    assert shift_of(forward(left=1, right=3), forward(left=2, right=2)) == pytest.approx(0.25)
    assert shift_of(forward(left=1, right=3), forward(left=10, right=30)) == 0
    assert shift_of(forward(left=1), forward(right=1)) == 1


def test_what_is_needed_grows_with_the_batch_but_for_state_and_casts():
    forward = Forward(parameters=10, cast_bytes=20, kept_bytes=100, largest_bytes=30, flops={})
    one, three = (needed_bytes(forward, batch=batch) for batch in (1, 3))
    assert three - one == 2 * (2 * 100 + TEMPORARIES * 30)
    assert one - needed_bytes(dataclasses.replace(forward, parameters=0), batch=1) == 10 * (5 * 4 + 4)


@pytest.mark.parametrize("name", ["clip", "ofasys"])
def test_kept_bytes_are_those_of_the_analytic_count(name: str):
    config = cut(config_of(name, "paper"), SMALLEST)
    model, sample = build(name, config=config, device=META), make_batch(name, config=config, batch=2, device=META)
    memory = count_module(model, kwargs=sample, settings=lambda: torch.autocast("cpu", torch.bfloat16)).memory
    one = forward_of(name, config)
    kept = one.cast_bytes + 2 * one.kept_bytes
    # CUDA's autocast norms in 32 bits, the CPU's does not: OFASys norms what is in 16 bits already
    assert kept == pytest.approx(memory.activation_bytes, rel=0.02 if name == "clip" else 0.25)
    assert kept >= 0.98 * memory.activation_bytes
    assert memory.workspace_bytes <= 2 * TEMPORARIES * one.largest_bytes
    assert one.parameters * 16 == memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes


def test_parameters_are_not_kept_and_a_weight_is_cast_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8, device=META), nn.Linear(8, 8, bias=False, device=META)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(self.norm(x)))

    model = Twice()
    forward = count_forward(model, lambda: model(torch.empty(1, 4, 8, device=META)))
    assert forward.cast_bytes == 2 * 8 * 8
    rows, half, full = 4, 2 * 4 * 8, 4 * 4 * 8
    assert forward.kept_bytes == full + 2 * 4 * rows + 2 * half  # the norm's input, means, deviations; both inputs
    assert forward.largest_bytes == full
    assert forward.flops == {"": 2 * 2 * 4 * 8 * 8}


def test_a_norm_keeps_its_input_and_attention_no_scores():
    config = cut(config_of("ctvlm", "paper"), SMALLEST)
    one = forward_of("ctvlm", config)
    words, tokens = config.small.language.vocabulary, 2048
    assert one.largest_bytes == max(4 * words * tokens, 2 * 2 * 3072 * config.large.language.shape.mlp)
    two = forward_of("ctvlm", config, batch=2)
    assert two.kept_bytes == pytest.approx(2 * one.kept_bytes, rel=0.02)
    assert two.cast_bytes == one.cast_bytes <= 2 * one.parameters


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


def test_tiny_models_are_what_they_were():
    clip, ctvlm = config_of("clip", "tiny"), config_of("ctvlm", "tiny")
    assert (clip.vision.layers, clip.text.layers) == (1, 1)
    assert {branch.language.shape.layers for branch in (ctvlm.small, ctvlm.large)} == {1}
    for name in ("qwen3-vl", "unified-io-2", "ofasys"):
        assert config_of(name, "tiny") == models.config_of(name, "tiny")
    assert config_of("imagebind", "tiny").imu.drop_path == 0.0
    loss = models.loss_of(
        build("clip", size="tiny", device=torch.device("cpu"))(
            **make_batch("clip", size="tiny", batch=2, device=torch.device("cpu"))
        )
    )
    assert loss.isfinite()


def test_the_table_of_choices_names_each_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["bench.gpu.models.zoo", "--memory-gib", "78"])
    zoo.main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[1] for row in rows[2:]] == list(NOTES)
    assert rows[3].startswith("| 78 GiB | qwen3-vl | 4 | 1/6 | 1.59 B | 67 GiB | ")
