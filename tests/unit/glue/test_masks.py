"""Masks from ids: those of Hugging Face, and Cornstarch's words."""

from __future__ import annotations

import glued_models as cases
import numpy as np
import pytest
import torch

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


def test_masks_of_no_kind_or_of_several_rows_are_refused():
    with pytest.raises(ValueError, match="unknown kind of mask 'prefix'; choose one of: causal, gemma, cornstarch"):
        cases.glued().mask(IDS, "prefix")
    with pytest.raises(ValueError, match=r"2 rows, but a mask is for one sequence; call mask\(\) per row, or pack"):
        cases.glued().mask(IDS.expand(2, -1))
    with pytest.raises(ValueError, match="documents have 19 tokens, but input_ids 20; pass one for each token"):
        cases.glued().mask(IDS, documents=torch.zeros(19, dtype=torch.long))
