from __future__ import annotations

import pytest
import torch

from mosaic.context.attention import Attend, ContextBatch
from mosaic.context.plan import plan_context
from mosaic.context.words import causal, packed

MASK = packed([causal(3), causal(2)], num_tokens=7)


def batch() -> ContextBatch:
    return ContextBatch(attend=Attend(plan_context(MASK, 1, block=4)))


def test_labels_are_shifted_within_documents_before_they_are_cut():
    labels = torch.arange(10, 17)[None]
    assert batch().shift(labels).tolist() == [[11, 12, -100, 14, -100, -100, -100]]
    given = batch().inputs(input_ids=labels, labels=labels)
    assert given["shift_labels"].tolist() == [[11, 12, -100, 14, -100, -100, -100, -100]]
    assert int(given["num_items_in_batch"]) == 3
    assert given["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert given["input_ids"].tolist() == [[*range(10, 17), 0]]


def test_gradients_of_embeddings_flow_back_to_the_whole_sequence():
    whole = torch.randn(1, 7, 4, requires_grad=True)
    batch().inputs(inputs_embeds=whole)["inputs_embeds"].sum().backward()
    assert torch.equal(whole.grad, torch.ones(1, 7, 4))


def test_wrong_tensors_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"has 5 tokens in dimension 1, but the mask has 7; cut whole"):
        batch().cut(torch.ones(1, 5))
    with pytest.raises(ValueError, match="pass either input_ids or inputs_embeds"):
        batch().inputs()
