"""The model zoo: models train, what may be missing may be missing, and bad input is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic import models
from mosaic.engine import find_modules
from mosaic.models import imagebind, multitask_clip, multitask_ofasys, qwen_val
from mosaic.models.layers.attention import Rotary
from mosaic.models.layers.language_model import merge
from mosaic.models.layers.targets import shifted, target_mask
from mosaic.models.layers.towers import cut_patches
from mosaic.models.qwen3_vl import positions_of

UNUSED = ("adaptors.motion", "adaptors.box", "adaptors.phone", "adaptors.category", "readers.audio", "writers.audio")
"""What none of Spindle's seven tasks of OFASys uses."""
TABLE_1_PATCHES = {"patch": 11, "audio_stride": (5, 6)}


def loss_of(name: str, model: nn.Module, **changes: object) -> torch.Tensor:
    batch = models.make_batch(name, batch=2) | changes
    return models.loss_of(model(**{key: value for key, value in batch.items() if value is not None}))


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_trains_all_of_its_parameters(name: str):
    model = models.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        loss = loss_of(name, model)
        loss.backward()
        losses.append(loss.item())
        spared = UNUSED if name == "multitask-ofasys" else ()
        still = [key for key, p in model.named_parameters() if p.grad is None and not key.startswith(spared)]
        assert not still
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("convolution", "extent"),
    [
        (nn.Conv1d(3, 8, 4, 4), (18,)),
        (nn.Conv2d(3, 8, (2, 4), (2, 4), bias=False), (6, 13)),
        (nn.Conv3d(3, 8, (2, 3, 5), (2, 3, 5)), (4, 6, 10)),
        (nn.Conv2d(3, 8, 4, 2), (8, 10)),
    ],
)
def test_patches_are_cut_as_by_the_convolution(convolution: nn.Module, extent: tuple[int, ...]):
    x = torch.randn(2, 3, *extent, requires_grad=True)
    expected = convolution(x).movedim(1, -1)
    found = cut_patches(convolution, x)
    torch.testing.assert_close(found, expected)
    weights = (x, *convolution.parameters())
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["clip", "ctvlm", "qwen3-vl", "unified-io-2"])
def test_models_whose_patches_do_not_overlap_need_no_convolution(name: str):
    names: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        loss_of(name, models.build(name)).backward()
    assert "aten.addmm.default" in names
    assert not [found for found in names if "conv" in found]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("imagebind", "audio"),
        ("imagebind", "text"),
        ("qwen3-vl", "image"),
        ("unified-io-2", "audio_history"),
        ("unified-io-2", "text_targets"),
        ("ofasys", "video"),
        ("ofasys", "image_targets"),
        ("ctvlm", "image"),
    ],
)
def test_a_batch_may_lack_a_modality_or_a_target(name: str, missing: str):
    loss = loss_of(name, models.build(name), **{missing: None})
    loss.backward()
    assert torch.isfinite(loss)


def test_spindles_workloads_have_its_numbers_of_tasks_and_run_any_of_them():
    model = models.build("multitask-clip")
    found = model(**models.make_batch("multitask-clip", tasks=["text_imu", "image_depth"]))
    assert set(found) == {"text_imu", "image_depth", "loss"}
    model = models.build("multitask-ofasys")
    found = model(**models.make_batch("multitask-ofasys", tasks=["text_to_motion"]))
    assert found["loss"] == found["text_to_motion"]
    batch = models.make_batch("qwen-val", batch=2, tasks=["audio-language"])
    assert "image" not in batch
    assert torch.isfinite(models.build("qwen-val")(**batch)["loss"])
    assert [len(workload.TASKS) for workload in (multitask_clip, multitask_ofasys, qwen_val)] == [10, 7, 3]
    assert {name for pair in multitask_clip.TASKS.values() for name in pair} == set(imagebind.MODALITIES)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("unified-io-2", {"merged": 2}), ("ofasys", {"merged": 2, "written_tokens": 4}), ("imagebind", TABLE_1_PATCHES)],
)
def test_what_only_table_1s_sizes_have_trains(name: str, changes: dict[str, Any]):
    config = dataclasses.replace(models.config_of(name, "tiny"), **changes)
    model = models.build(name, config=config)
    models.loss_of(model(**models.make_batch(name, batch=2, config=config))).backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


def test_three_to_ten_tasks_of_multitask_clip_place_the_encoders_that_they_call():
    entry, model = models.find_model("multitask-clip"), models.build("multitask-clip", device="meta")
    for count in range(3, 11):
        batch = models.make_batch("multitask-clip", device="meta", tasks=entry.tasks[:count])
        assert tuple(batch) == entry.tasks[:count]
        assert "loss" in model(**batch)
    three = models.make_batch("multitask-clip", device="meta", tasks=entry.tasks[:3])
    found = find_modules(model, three, may_share=True, include=entry.modules).graph.names
    assert set(found) == {f"encoders.{name}" for name in ("image", "text", "audio", "depth")}
    assert set(entry.modules) == set(entry.encoders)


@pytest.mark.parametrize("task", ["captioning", "text_to_motion"])
def test_tasks_that_are_padded_together_learn_what_each_learns_alone(task: str):
    """Grounding and summarization are longer or shorter, so rows are padded on both sides of the model."""
    model = models.build("multitask-ofasys").double()
    batch = models.make_batch("multitask-ofasys", batch=2)
    batch = {name: {key: _double(value) for key, value in part.items()} for name, part in batch.items()}
    together = model(**batch)
    alone = model(**{task: batch[task]})
    assert torch.allclose(together[task], alone[task], rtol=1e-9)


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def test_a_video_takes_the_place_of_an_image():
    model = models.build("qwen3-vl")
    batch = models.make_batch("qwen3-vl", video=True)
    assert torch.isfinite(models.loss_of(model(**batch)))
    with pytest.raises(ValueError, match="images or videos"):
        model(**batch, image=batch["video"][:, :, 0])
    with pytest.raises(ValueError, match="4096 tokens of what is seen do not fit into text_tokens=2048"):
        models.make_batch("qwen3-vl", "paper", video=True, device="meta")


def test_features_are_merged_as_masked_scatter_merges_them():
    torch.manual_seed(0)
    where = torch.tensor([[False, True, True, False], [True, False, False, True]])
    results = []
    for way in (merge, lambda x, where, features: x.masked_scatter(where.unsqueeze(-1), features)):
        given = [
            torch.arange(24.0).view(2, 4, 3).requires_grad_(),
            torch.arange(100.0, 112).view(4, 3).requires_grad_(),
        ]
        merged = way(given[0], where, given[1])
        merged.square().sum().backward()
        results.append((merged, given[0].grad, given[1].grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_images_of_qwen_change_the_text_after_them_only():
    model = models.build("qwen3-vl").eval()
    batch = models.make_batch("qwen3-vl", batch=1)
    other = batch | {"image": batch["image"] + 1}
    with torch.no_grad():
        apart = (model(**batch)["logits"] - model(**other)["logits"]).abs().amax(-1)[0]
    assert apart[0] == 0
    assert (apart[1:] > 0).all()


def test_the_published_parts_can_be_frozen():
    model = models.build("imagebind", freeze=models.find_model("imagebind").frozen)
    loss_of("imagebind", model).backward()
    trained = {key.split(".")[1] for key, p in model.named_parameters() if p.grad is not None and "." in key}
    assert trained == {"audio", "depth", "thermal", "imu"}
    model = models.build("unified-io-2", freeze=models.find_model("unified-io-2").frozen)
    loss_of("unified-io-2", model).backward()
    assert model.encoders["image"].project.weight.grad is not None
    assert model.encoders["image"].tower.tokens.cut.weight.grad is None


def test_a_seed_gives_the_same_model_and_batch_and_leaves_the_callers_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = models.build("clip", seed=5), models.build("clip", seed=5)
    one, two = models.make_batch("clip", seed=7), models.make_batch("clip", seed=7)
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["image"], models.make_batch("clip", seed=8)["image"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.build("blip"), "no model 'blip' in the zoo; it has clip, qwen3-vl"),
        (lambda: models.build("clip", "huge"), "no size 'huge'; clip has tiny, public, paper"),
        (lambda: models.build("clip", freeze=["image"]), "no module 'image' to freeze; it has visual, text"),
        (lambda: models.make_batch("qwen-val", tasks=["vl"]), "unknown task 'vl'"),
        (lambda: models.build("imagebind")(smell=torch.ones(1)), r"unknown modalities \['smell'\]"),
        (lambda: models.build("ofasys")(text=torch.ones(1, 2)), "a modality and a target are needed"),
        (lambda: models.build("multitask-clip")(), "got no tasks"),
        (lambda: models.loss_of({"image": torch.ones(1)}), "returned image and no loss"),
        (lambda: Rotary(8, layout=(1, 1, 1)), "sums to 3; a head of 8 has 4 frequencies"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_target_sees_itself_and_what_stands_before_it():
    assert target_mask((2, 1), torch.device("cpu")).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]
    assert shifted(torch.tensor([[5, 6, 7]])).tolist() == [[0, 5, 6]]


def test_positions_of_an_image_are_its_rows_and_columns():
    found = positions_of(8, 1, 1, 2, torch.device("cpu"))
    assert found.tolist() == [
        [0, 0, 0],
        *([1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2]),
        *([3, 3, 3], [4, 4, 4], [5, 5, 5]),
    ]
