"""Masks and positions from ids: those of Hugging Face, and Cornstarch's words."""

from __future__ import annotations

from typing import Any

import glued_models as cases
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from mosaic.glue import MultimodalModel, Tower

TEXT = [3, 4]
IDS = torch.tensor(
    [[*TEXT, *[cases.IMAGE] * 4, 5, *[cases.IMAGE] * 4, *[cases.AUDIO] * 3, 6, *[cases.AUDIO] * 3, 7, 8]]
)


def test_a_causal_mask_sees_what_came_before_in_its_document():
    documents = torch.tensor([[0] * 7 + [1] * 11 + [-1] * 2])
    dense = cases.glued().mask(IDS, documents=documents).dense()
    expected = np.tril(np.ones((20, 20), bool))
    expected[7:, :7] = expected[18:] = False
    assert (dense == expected).all()


def test_items_beside_each_other_are_told_apart_by_their_lengths():
    ids = torch.tensor([*[cases.IMAGE] * 6, 1])
    model = cases.glued()
    together, apart = (model.mask(ids, "gemma", lengths=lengths).dense() for lengths in (None, {"vision": [4, 2]}))
    assert together[:6, :6].all()
    assert apart[:4, :4].all()
    assert apart[4:6, :6].all()
    assert not apart[:4, 4:].any()
    with pytest.raises(ValueError, match="6 placeholders of 'vision', and its 2 items have 5 together"):
        model.mask(ids, "gemma", lengths={"vision": [4, 1]})


def test_masks_of_no_kind_or_of_several_rows_are_refused():
    with pytest.raises(ValueError, match="kind='prefix' is not a kind of mask; use one of causal, gemma, cornstarch"):
        cases.glued().mask(IDS, "prefix")
    with pytest.raises(ValueError, match=r"2 rows, and a mask is of one sequence; call mask\(\) by row, or pack them"):
        cases.glued().mask(IDS.expand(2, -1))
    with pytest.raises(ValueError, match="documents are of 19 tokens and input_ids of 20; give one for each token"):
        cases.glued().mask(IDS, documents=torch.zeros(19, dtype=torch.long))


def test_positions_begin_anew_in_each_document():
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [4, 2, 2, 2, -1, -1], [-1, 3, -1, 3, 3, 5]])
    ids = torch.ones(3, 6, dtype=torch.long)
    found = cases.glued().positions(ids, documents)
    assert found.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 0], [0, 0, 0, 1, 2, 0]]
    masks = [cases.glued().mask(ids[row], documents=documents[row]) for row in range(3)]
    assert [mask.positions().tolist() for mask in masks] == found.tolist()
    assert cases.glued().positions(torch.ones(2, 3, dtype=torch.long)).tolist() == [[0, 1, 2]] * 2


def grid_positions(inputs: dict[str, Any]) -> list[Tensor]:
    """Time, row and column of patches, of which two by two are one token."""
    sizes = [(t, h // 2, w // 2) for t, h, w in inputs["image_grid_thw"].tolist()]
    return [torch.cartesian_prod(*map(torch.arange, size)).T for size in sizes]


def qwen2_vl() -> transformers.Qwen2VLForConditionalGeneration:
    config = transformers.Qwen2VLConfig(
        text_config={**cases.TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": cases.WIDTH, "patch_size": 4},
        image_token_id=7,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def test_positions_on_three_axes_are_qwen2_vls():
    grid = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 4, 2]])
    ids = torch.tensor([[1, *[7] * 4, 2, *[7] * 3, 3, 4], [0, 0, 0, 5, 6, 3, *[7] * 2, 4, 2, 1]])
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[1, 4] = 0
    theirs, _ = qwen2_vl().model.get_rope_index(
        ids, mm_token_type_ids=(ids == 7).int(), image_grid_thw=grid, attention_mask=mask
    )
    tower = Tower(cases.vision(), token=7, positions=grid_positions)
    model = MultimodalModel(language_model=cases.language_model(), vision=tower)
    found = model.positions(ids, mask - 1, vision={"image_grid_thw": grid})
    assert torch.equal(found, theirs)
    text = model.positions(torch.tensor([[1, 2]]))
    assert text.shape == (1, 1, 2)


def test_a_glued_language_model_with_m_rope_is_called_with_its_positions():
    """Qwen2-VL's own halves, glued: the logits are those of the whole."""
    torch.manual_seed(0)
    theirs = qwen2_vl().eval()
    grid = torch.tensor([[1, 4, 4], [1, 2, 6]])
    ids = torch.tensor([[1, *[7] * 4, 2, 5, 6], [1, 2, *[7] * 3, 3, 4, 5]])
    given = {"pixel_values": torch.randn(28, 3 * 2 * 16), "grid_thw": grid}
    text = theirs.model.language_model

    class Headed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = text, theirs.lm_head

        def get_input_embeddings(self) -> torch.nn.Module:
            return text.get_input_embeddings()

        def forward(self, **inputs: Any) -> Tensor:
            return self.head(self.body(**inputs).last_hidden_state)

    tower = Tower(
        theirs.model.visual,
        projector=None,
        token=7,
        width=cases.WIDTH,
        before=lambda inputs: {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["grid_thw"]},
        after=lambda inputs, output: output.pooler_output,
        positions=lambda inputs: grid_positions({"image_grid_thw": inputs["grid_thw"]}),
    )
    ours = MultimodalModel(language_model=Headed(), vision=tower)
    kinds = (ids == 7).int()
    expected = theirs(
        input_ids=ids, pixel_values=given["pixel_values"], image_grid_thw=grid, mm_token_type_ids=kinds
    ).logits
    assert torch.equal(ours(ids, vision=given), expected)
