"""The model zoo against what is published: parameters, Table 1's dimensions, Table 2's inputs; all without data."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from torch import nn

from mosaic import models
from mosaic.cost.analytic import count_module
from mosaic.engine import find_modules
from mosaic.models import imagebind, unified_io2
from mosaic.models.layers.block import Shape


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def public(name: str, config: Any = None) -> nn.Module:
    return models.build(name, "public", config=config, device="meta")


def test_clip_has_the_published_parameters():
    model = public("clip")
    assert count(model) == 427_616_513  # open_clip's profile: 427.62 M
    assert (count(model.visual), count(model.text)) == (303_966_208, 123_650_304)


def test_qwen3_vl_has_its_checkpoints_parameters():
    model = public("qwen3-vl")
    assert count(model) == 8_767_123_696
    text = count(model.language_model) + count(model.embed_tokens) + count(model.lm_head)
    assert text / 1e9 == pytest.approx(8.191, abs=0.001)  # what Table 1 rounds to 8.1 B


def test_imagebind_has_the_published_parameters():
    model = public("imagebind")
    assert count(model) / 1e9 == pytest.approx(1.2, rel=0.001)
    millions = {name: count(encoder) / 1e6 for name, encoder in model.encoders.items()}
    expected = {"image": 632.8, "text": 354.0, "audio": 86.2, "depth": 21.9, "thermal": 86.2, "imu": 19.6}
    assert millions == pytest.approx(expected, abs=0.05)


def test_table_1s_imagebind_is_the_originals_defaults():
    assert count(public("imagebind", imagebind.DEFAULTS)) / 1e6 == pytest.approx(641.5, abs=0.05)


@pytest.mark.parametrize(
    ("config", "billions"), [(unified_io2.LARGE, 1.1), (unified_io2.XL, 3.2), (unified_io2.XXL, 6.8)]
)
def test_unified_io_2_has_the_published_parameters_within_3_percent(config: Any, billions: float):
    assert count(public("unified-io-2", config)) / 1e9 == pytest.approx(billions, rel=0.03)


def test_ofasys_without_what_it_adds_has_ofas_parameters_within_3_percent():
    model = public("ofasys")
    added = [model.adaptors[name] for name in ("audio", "motion", "phone", "struct", "category")]
    added += [model.readers, model.writers]
    assert (count(model) - sum(map(count, added))) / 1e6 == pytest.approx(930, rel=0.03)
    assert count(model) / 1e6 == pytest.approx(965, abs=1)


def test_ctvlms_parts_have_the_published_parameters():
    model = public("ctvlm")
    for branch, parameters in ((model.small, 1_100_048_384), (model.large, 6_738_415_616)):
        language = count(branch.language_model) + count(branch.embed_tokens) + count(branch.lm_head)
        assert language == parameters
    assert count(model.large.visual) / 1e6 == pytest.approx(303.2, abs=0.1)  # ViT-L/14 without projection and class


def test_qwen_vals_parts_have_the_published_parameters_within_2_percent():
    model = public("qwen-val")
    language = count(model.language_model) + count(model.embed_tokens) + count(model.lm_head)
    assert language / 1e9 == pytest.approx(7.7, rel=0.02)
    assert count(model.visual) / 1e9 == pytest.approx(1.9 + 0.08, rel=0.025)
    assert count(model.audio) / 1e9 == pytest.approx(0.64, rel=0.02)
    assert count(model) / 1e9 == pytest.approx(10.3, abs=0.01)  # Spindle: 9.25


PAPER = {
    "qwen3-vl": (8.767, 8.1),
    "unified-io-2": (6.899, 3.8),
    "imagebind": (0.645, 1.2),
    "ofasys": (1.567, 6.3),
}
"""Billions of parameters: as counted, and as Table 1 has it."""


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sizes_have_the_parameters_that_their_docstrings_say(name: str):
    counted, table = PAPER[name]
    assert count(models.build(name, "paper", device="meta")) / 1e9 == pytest.approx(counted, abs=0.001)
    module = {"qwen3-vl": "qwen3_vl", "unified-io-2": "unified_io2"}.get(name, name)
    assert f"{table} B" in " ".join(import_module(f"mosaic.models.{module}").__doc__.split())


def dimensions(shape: Shape) -> tuple[int, int]:
    return shape.layers, shape.width


def test_the_papers_sizes_have_the_dimensions_of_table_1():
    qwen = models.config_of("qwen3-vl", "paper")
    assert dimensions(qwen.language.shape) == (36, 4096)
    assert (qwen.vision.shape.layers, qwen.vision.out_width) == (27, 4096)
    unified = models.config_of("unified-io-2", "paper")
    assert (2 * unified.language.layers, unified.language.width) == (48, 3072)
    assert dimensions(unified.vision) == (11, 768)
    bound = models.config_of("imagebind", "paper")
    assert [dimensions(part) for part in (bound.image, bound.audio, bound.text)] == [(24, 1024), (12, 768), (12, 768)]
    ofa = models.config_of("ofasys", "paper")
    assert (ofa.encoder.layers + ofa.decoder.layers, ofa.encoder.width) == (36, 1280)
    assert ofa.own_layers[:3] == (("image", 8), ("text", 4), ("audio", 6))


TABLE_2 = {
    "text": (2, 2048),
    "input_ids": (2, 2048),
    "text_targets": (2, 2048),
    "image": (2, 3, 512, 512),
    "video": (2, 3, 32, 512, 512),
    "audio": (2, 1, 128, 800),
    "depth": (2, 1, 224, 224),
    "thermal": (2, 1, 256, 256),
    "imu": (2, 6, 800),
    "motion": (2, 256, 144),
}


@pytest.mark.parametrize("name", models.PAPER_MODELS)
def test_batches_of_the_papers_size_have_the_shapes_of_table_2(name: str):
    batch = models.make_batch(name, "paper", batch=2, device="meta")
    shapes = {key: tuple(value.shape) for key, value in batch.items()}
    assert {key: shapes[key] for key in TABLE_2 if key in shapes} == {
        key: shape for key, shape in TABLE_2.items() if key in shapes
    }
    assert len(set(TABLE_2) & set(shapes)) >= 2
    assert all(value.device.type == "meta" for value in batch.values())
    if "box" in shapes:
        assert shapes["box"] == (2, 16, 4)


def operations(name: str, *, training: bool) -> dict[str, float]:
    """Operations of forward of each module at the paper's size, for one sample, in trillions."""
    entry = models.find_model(name)
    model = models.build(name, "paper", device="meta")
    finding = find_modules(model, models.make_batch(name, "paper", batch=1, device="meta"), include=entry.modules)
    found = {}
    for subject in finding.subjects:
        counts = count_module(subject.module, subject.args, subject.kwargs, training=training)
        assert not counts.uncounted
        found[subject.name] = sum(operator.flops * operator.calls for operator in counts.forward.operators) / 1e12
    return found


def test_the_papers_models_can_be_counted_without_their_weights():
    found = operations("qwen3-vl", training=False)
    assert set(found) == {"visual", "embed_tokens", "language_model", "lm_head"}
    blocks = 2 * 6.945e9 * 2048 / 1e12  # two operations a parameter and token
    assert found["language_model"] == pytest.approx(blocks, rel=0.1)  # and attention
    assert found["embed_tokens"] == 0
    found = operations("clip", training=True)
    assert set(found) == {"visual", "text"}
    for name, parameters, tokens in (("visual", 302.3e6, 1025), ("text", 85.1e6, 2048)):
        assert found[name] == pytest.approx(2 * parameters * tokens / 1e12, rel=0.25)  # and attention
