"""The model zoo against what is published: parameters, Table 1's dimensions, Table 2's inputs; all without data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from torch import nn

from mosaic import models
from mosaic.cost.counting import count_module
from mosaic.engine import find_modules
from mosaic.models import imagebind, unified_io2
from mosaic.models.layers.block import Shape


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def language(model: Any) -> int:
    return count(model.language_model) + count(model.embed_tokens) + count(model.lm_head)


def ofa(model: Any) -> int:
    """Parameters without what OFASys adds to OFA."""
    added = [model.adaptors[name] for name in ("audio", "motion", "phone", "struct", "category")]
    return count(model) - sum(map(count, [*added, model.readers, model.writers]))


IMAGEBIND = {"image": 632.8, "text": 354.0, "audio": 86.2, "depth": 21.9, "thermal": 86.2, "imu": 19.6}
PUBLISHED: list[tuple[str, Any, list[tuple[Callable[[Any], int], float, float]]]] = [
    ("clip", None, [(lambda m: count(m.visual), 303.966208, 0), (lambda m: count(m.text), 123.650304, 0)]),
    ("clip", None, [(count, 427.616513, 0)]),  # open_clip's profile: 427.62 M
    ("qwen3-vl", None, [(count, 8767.123696, 0), (language, 8191, 1)]),  # what Table 1 rounds to 8.1 B
    ("imagebind", None, [(lambda m, n=n: count(m.encoders[n]), size, 0.05) for n, size in IMAGEBIND.items()]),
    ("imagebind", None, [(count, 1200, 1.2)]),
    ("imagebind", imagebind.DEFAULTS, [(count, 641.5, 0.05)]),  # what Table 1 has
    ("unified-io-2", unified_io2.LARGE, [(count, 1100, 33)]),
    ("unified-io-2", unified_io2.XL, [(count, 3200, 96)]),
    ("unified-io-2", unified_io2.XXL, [(count, 6800, 204)]),
    ("ofasys", None, [(ofa, 930, 27.9), (count, 965, 1)]),
    ("ctvlm", None, [(lambda m: language(m.small), 1100.048384, 0), (lambda m: language(m.large), 6738.415616, 0)]),
    ("ctvlm", None, [(lambda m: count(m.large.visual), 303.2, 0.1)]),  # ViT-L/14 without projection and class
    ("qwen-val", None, [(language, 7700, 154), (lambda m: count(m.visual), 1980, 49.5)]),
    ("qwen-val", None, [(lambda m: count(m.audio), 640, 12.8), (count, 10300, 10)]),  # Spindle: 9.25 B
    ("multitask-clip", None, [(count, 1200, 1.2)]),
    ("multitask-ofasys", models.config_of("multitask-ofasys", "spindle"), [(count, 660, 26.4)]),
]
"""Models, configurations, and the parts of them with their published parameters, in millions, and a tolerance."""


@pytest.mark.parametrize(("name", "config", "parts"), PUBLISHED)
def test_models_and_their_parts_have_the_published_parameters(name: str, config: Any, parts: list[Any]):
    model = models.build(name, "public", config=config, device="meta")
    for part, millions, tolerance in parts:
        assert part(model) / 1e6 == pytest.approx(millions, rel=0, abs=tolerance + 1e-9)


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


@pytest.mark.parametrize("name", PAPER)
def test_table_1_is_kept_in_layers_and_widths_and_not_in_tokens(name: str):
    paper, table = models.config_of(name, "paper"), models.config_of(name, "table1")
    for field in dataclasses.fields(paper):
        value = getattr(paper, field.name)
        if isinstance(value, Shape) or field.name in ("own_layers", "vision", "language"):
            assert getattr(table, field.name) == value
    assert dataclasses.replace(table.inputs, text_tokens=2048) == paper.inputs


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


def operations(name: str) -> dict[str, float]:
    """Operations of forward of each module at the paper's size, for one sample, in trillions."""
    entry = models.find_model(name)
    model = models.build(name, "paper", device="meta")
    finding = find_modules(model, models.make_batch(name, "paper", batch=1, device="meta"), include=entry.modules)
    found = {}
    for subject in finding.subjects:
        counts = count_module(subject.module, subject.args, subject.kwargs)
        found[subject.name] = sum(operator.flops * operator.calls for operator in counts.forward.operators) / 1e12
    return found


def test_the_papers_models_can_be_counted_without_their_weights():
    found = operations("clip")
    assert set(found) == {"visual", "text"}
    for name, parameters, tokens in (("visual", 302.3e6, 1025), ("text", 85.1e6, 2048)):
        assert found[name] == pytest.approx(2 * parameters * tokens / 1e12, rel=0.25)  # and attention
