"""Models of one list of layers, and of several that feed each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from part_models import DECODERS, ENCODERS, SEVERAL_MODULES, PartedCase, chunks_of, tokens
from parted_equality import check_cut, check_equal
from torch import nn

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import count_units, rows_of_units, take_units
from mosaic.parts.split import ModelSplit

ALL = DECODERS | ENCODERS | SEVERAL_MODULES


@pytest.mark.parametrize("name", ALL)
def test_chunks_give_the_plain_models_loss_and_gradients(name: str):
    check_equal(ALL[name])


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
    piece = take_units(split, batch, "visual", range(1, 3))
    assert torch.equal(piece["pixel_values"], batch["pixel_values"][16:])
    assert torch.equal(piece["image_grid_thw"], batch["image_grid_thw"][1:])
    assert piece["input_ids"] is batch["input_ids"]
    others = take_units(split, batch, "visual", [2, 0])
    rows = batch["image_grid_thw"].prod(-1).tolist()
    assert rows_of_units(split, batch, "visual") == tuple(rows)
    pixels = batch["pixel_values"].split(rows)
    assert torch.equal(others["pixel_values"], torch.cat([pixels[2], pixels[0]]))
    with pytest.raises(ValueError, match="units 2, 3 of 'visual'; this microbatch has 3"):
        take_units(split, batch, "visual", range(2, 4))


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
