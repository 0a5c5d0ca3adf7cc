"""The model zoo: every row trains, and sizes are those of the papers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mosaic import models
from mosaic.errors import MosaicError

META = torch.device("meta")
BILLIONS = {
    "clip-paper": 0.43,
    "qwen3-vl-paper": 8.77,
    "unified-io-2-paper": 6.9,
    "imagebind-paper": 0.64,
    "ofasys-paper": 1.57,
    "ctvlm-paper": 8.26,
    "multitask-clip-spindle": 1.20,  # as Spindle states it
    "multitask-ofasys-spindle": 0.68,  # 0.66 stated
    "qwen-val-spindle": 10.3,  # "up to 9.25" stated
    "t2v-paper": 12.49,  # 5 billion with cross-attention, and 8 billion without their head
}


def trained(name: str, **batch: object) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = models.build(name)
    output = model(**(batch or models.make_batch(name, batch=2)))
    models.loss_of(output).backward()
    return model, output


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_trains_and_has_the_same_weights_each_time(name: str):
    model, _ = trained(name)
    again = models.build(name)
    assert all(torch.equal(first, second) for first, second in zip(model.parameters(), again.parameters(), strict=True))
    row = models.find_model(name)
    for path in (*row.frozen, *(row.modules or ())):
        model.get_submodule(path)
    if name not in ("multitask-ofasys", "llava"):  # some adaptors have no task; LLaVA reads the layer before the last
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("size", BILLIONS)
def test_a_model_has_the_parameters_of_its_paper(size: str):
    model = models.build(*size.rsplit("-", 1), device=META)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(BILLIONS[size], rel=0.01)


@pytest.mark.parametrize(
    ("name", "backbone", "encoders", "ratio"),
    [
        ("qwen3-vl", ["language_model"], ["image"], 22.27 / 2.58),
        (
            "unified-io-2",
            ["encoder", "decoder"],
            ["image", "image_history", "audio", "audio_history"],
            16.70 / (1.48 + 1.06),
        ),
        ("ofasys", ["encoder", "decoder"], ["image", "text", "audio"], 4.80 / (1.35 + 0.72 + 0.95)),
    ],
)
def test_the_size_table1_has_the_ratio_of_operations_of_table_1(
    name: str, backbone: list[str], encoders: list[str], ratio: float
):
    model, sample = models.build(name, "table1", device=META), models.make_batch(name, "table1", batch=1, device=META)
    with FlopCounterMode(display=False) as counter:
        model(**sample)
    flops = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    of_encoders = sum(flops.get(f"{type(model).__name__}.encoders.{encoder}", 0) for encoder in encoders)
    of_backbone = sum(flops[f"{type(model).__name__}.{path}"] for path in backbone)
    assert of_backbone / of_encoders == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("name", ["multitask-clip", "multitask-ofasys"])
def test_tasks_together_lose_what_each_loses_alone_and_call_each_encoder_once(name: str):
    model, batch = models.build(name), models.make_batch(name, batch=3)
    calls: list[str] = []
    for path, encoder in model.encoders.items():
        encoder.register_forward_hook(lambda *_, path=path: calls.append(path))
    together = model(**batch)
    assert len(calls) == len(set(calls)) > 2
    for task in batch:
        alone = model(**{task: batch[task]})["loss"]
        assert together[task].item() == pytest.approx(alone.item(), rel=1e-4)


def test_frozen_modules_do_not_train_and_an_unknown_one_is_refused():
    model = models.build("unified-io-2", freeze=models.find_model("unified-io-2").frozen)
    assert not any(parameter.requires_grad for parameter in model.encoders.image.stack.parameters())
    assert all(parameter.requires_grad for parameter in model.encoder.parameters())
    with pytest.raises(ValueError, match="unknown module of clip 'nose'; choose one of: encoders"):
        models.build("clip", freeze=["nose"])


def test_published_clip_has_its_parameters_and_published_llava_needs_data():
    clip = models.build("clip", "public", device=META)
    assert sum(parameter.numel() for parameter in clip.parameters()) == pytest.approx(427.6e6, rel=1e-3)
    assert clip(**models.make_batch("clip", "public", batch=2, device=META))["loss"].shape == ()
    with pytest.raises(MosaicError, match="reads the values of its inputs"):
        models.build("llava", "public", device=META)


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [
        ("clip", {}, "the batch has nothing; choose from: image, text"),
        ("imagebind", {"smell": torch.zeros(1)}, "the batch has smell; choose from: image, audio"),
        ("multitask-clip", {"driving": {}}, "the batch has driving; choose from: image_text"),
        ("ofasys", {"text": torch.zeros(1, 6, dtype=torch.long)}, "pass an input and a target"),
    ],
)
def test_a_batch_without_something_to_learn_from_is_refused(name: str, batch: dict, message: str):
    with pytest.raises(ValueError, match=message):
        models.build(name)(**batch)
