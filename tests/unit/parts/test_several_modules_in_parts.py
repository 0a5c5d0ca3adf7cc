"""Models of several lists of layers that feed each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from chained_chunks import chunks_of
from lane_cases import Seen, seen_step
from part_models import IMAGE, SEVERAL_MODULES, PartedCase, tokens
from parted_equality import check_cut, check_equal
from torch import nn

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import count_units, rows_of_units, slice_piece, take_units
from mosaic.parts.split import ModelSplit


@pytest.mark.parametrize("name", SEVERAL_MODULES)
def test_chunks_of_several_modules_give_the_plain_models_loss_and_gradients(name: str):
    check_equal(SEVERAL_MODULES[name])


WITH_IMAGES = [name for name, case in SEVERAL_MODULES.items() if case.sizes]


def found(case: PartedCase) -> tuple[torch.nn.Module, ModelSplit]:
    torch.manual_seed(3)
    model = case.make()
    return model, find_split(model, case.batch())


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_an_encoder_may_run_in_pieces(name: str):
    case = SEVERAL_MODULES[name]
    model, split = found(case)
    check_cut(case, model, split, case.cuts[1], case.batch(), sizes=case.sizes, rtol=2e-6)


@pytest.mark.parametrize("name", WITH_IMAGES)
@pytest.mark.parametrize("cut", [1, 2])
def test_a_microbatch_may_have_no_images(name: str, cut: int):
    case = SEVERAL_MODULES[name]
    model, split = found(case)
    ids = tokens()
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if name == "glued":
        batch["vision"] = {"pixel_values": torch.empty(0, 3, 8, 8)}
    assert split.present(batch) == {"language_model"}
    assert count_units(split, batch, split.modules[0].name) == 0
    check_cut(case, model, split, case.cuts[cut], batch)


def test_a_microbatch_may_have_other_images_and_other_lengths_than_the_sample():
    case = SEVERAL_MODULES["llava"]
    model, split = found(case)
    ids = tokens(1, 5)
    ids[0, :4] = IMAGE
    check_cut(
        case, model, split, case.cuts[1], {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(1, 3, 8, 8)}
    )


@pytest.mark.parametrize("name", ["whisper", "llava"])
def test_in_double_precision_gradients_agree_to_twelve_digits(name: str):
    case = SEVERAL_MODULES[name]
    double = dataclasses.replace(case, make=lambda: case.make().double())
    model, split = found(dataclasses.replace(double, batch=lambda: doubled(case.batch())))
    check_cut(double, model, split, case.cuts[1], doubled(case.batch()), rtol=1e-12, strategy="recompute")


def doubled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def test_under_autocast_chunks_know_the_lower_precision_of_what_they_receive():
    case = SEVERAL_MODULES["llava"]
    model, split = found(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_cut(case, model, split, case.cuts[1], case.batch())


def test_images_whose_patches_lie_in_one_tensor_are_cut_by_their_grid():
    case = SEVERAL_MODULES["qwen3-vl"]
    _, split = found(case)
    batch = case.batch()
    assert count_units(split, batch, "visual") == 3
    piece = slice_piece(split, batch, "visual", 1, 2)
    assert torch.equal(piece["pixel_values"], batch["pixel_values"][16:])
    assert torch.equal(piece["image_grid_thw"], batch["image_grid_thw"][1:])
    assert piece["input_ids"] is batch["input_ids"]
    others = take_units(split, batch, "visual", [2, 0])
    rows = batch["image_grid_thw"].prod(-1).tolist()
    assert rows_of_units(split, batch, "visual") == tuple(rows)
    pixels = batch["pixel_values"].split(rows)
    assert torch.equal(others["pixel_values"], torch.cat([pixels[2], pixels[0]]))
    with pytest.raises(ValueError, match="units 2, 3 of 'visual'; this microbatch has 3"):
        slice_piece(split, batch, "visual", 2, 2)


def test_values_of_an_encoder_travel_on_only_as_long_as_layers_need_them():
    _, split = found(SEVERAL_MODULES["qwen3-vl"])
    assert len(split.carried("visual", 1)) == len(split.carried("visual", 2)) == 2  # hidden, and one merged feature
    assert len(split.exits("visual")) == 3
    assert [len(split.carried("language_model", layer)) for layer in (1, 2, 3)] == [3, 2, 1]
    _, whisper = found(SEVERAL_MODULES["whisper"])
    assert [len(whisper.carried("decoder", layer)) for layer in (1, 2)] == [2, 2]


def test_a_chunk_says_what_comes_in_and_what_leaves_it():
    _, split = found(SEVERAL_MODULES["llava"])
    first, mixed, last = chunks_of(*SEVERAL_MODULES["llava"].cuts[2])
    assert (list(split.entries(first)), list(split.leaves(first))) == ([], ["vision_tower"])
    assert (list(split.entries(mixed)), list(split.leaves(mixed))) == (["vision_tower"], ["language_model"])
    assert (list(split.entries(last)), list(split.leaves(last))) == (["language_model"], [])


def test_a_frozen_encoder_sends_what_takes_no_gradient():
    case = SEVERAL_MODULES["llava"]
    model, split = found(case)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    check_cut(case, model, split, case.cuts[1], case.batch(), strategy="recompute")
    rank = PartedModel(model, split, chunks_of(*case.cuts[0]))
    assert not rank.forward(0, case.batch())["vision_tower"][0].requires_grad


class TwoWays(nn.Module):
    """Feeds an encoder with either of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(
        self, x: torch.Tensor, image: torch.Tensor | None = None, video: torch.Tensor | None = None
    ) -> torch.Tensor:
        seen = image if image is not None else video
        if seen is not None and seen.ndim > 1:
            for layer in self.encoder:
                seen = layer(seen)
            x = x + seen
        for layer in self.decoder:
            x = layer(x)
        return x


def test_a_microbatch_that_takes_another_way_than_the_sample_is_refused():
    model = TwoWays()
    x = torch.randn(2, 4)
    rank = PartedModel(
        model,
        find_split(model, {"x": x, "image": x.clone()}),
        chunks_of("encoder[0:1/2]", "encoder[1:2/2]", "decoder[0:2/2]"),
    )
    with pytest.raises(UnsplittableError, match=r"encoder\.0 is called .* none of the tensors .* 'encoder' \(image\)"):
        rank.forward(2, {"x": x, "video": x})
    with pytest.raises(UnsplittableError, match=r"what encoder\.0 returns was not returned"):
        rank.forward(0, {"x": x, "image": x[0]})
    with pytest.raises(ValueError, match=r"encoder.0:1/2. has nothing to do with a microbatch that calls decoder"):
        rank.forward(0, {"x": x})


def test_layers_that_lower_their_precision_under_autocast_are_foreseen():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    batch = {"input": torch.randn(2, 4)}
    case = PartedCase(make=lambda: model, batch=lambda: batch, cuts=(), loss=lambda output: output.float().sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_cut(case, model, find_split(model, batch), ("model[0:1/3]", "model[1:2/3]", "model[2:3/3]"), batch)


def test_a_chunk_hands_an_encoders_tensors_to_its_next_part_or_those_of_its_last_part_to_who_reads_them():
    split = find_split(Seen().double(), seen_step((3, 2))[0])
    first, both, last, text = chunks_of("vision[0:2/3]", "vision[2:3/3]+audio[0:1/2]", "audio[1:2/2]", "text[0:4/4]")
    assert split.handed(first, both) == ("vision",)
    assert split.handed(first, text) == ()
    assert split.handed(both, last) == ("audio",)
    assert split.handed(both, text) == ("vision",)
    assert split.handed(last, text) == ("audio",)
