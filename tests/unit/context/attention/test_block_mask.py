from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import BLOCK, MASKS, inputs_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mosaic.context.attention import Attend, ContextBatch
from mosaic.context.attention.block_mask import block_mask
from mosaic.context.plan import ContextPlan, plan_context

KINDS = ("kv", "full_kv", "q", "full_q")


def made(plan: ContextPlan, rank: int) -> BlockMask:
    columns = plan.ranks * plan.distribution.slots
    return block_mask(plan, rank, plan.layout.column_of(), columns, torch.device("cpu"))


def torchs(own: BlockMask) -> BlockMask:
    return create_block_mask(own.mask_mod, None, None, *own.seq_lengths, device="cpu", BLOCK_SIZE=own.BLOCK_SIZE)


def lists(mask: BlockMask, kind: str) -> list[list[int]]:
    counts, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
    return [row[:count].tolist() for row, count in zip(indices, counts.tolist(), strict=True)]


@pytest.mark.parametrize("name", list(MASKS))
def test_it_is_the_mask_that_torch_finds_pair_by_pair(name: str):
    own = made(plan_context(MASKS[name], 1, block=BLOCK), 0)
    theirs = torchs(own)
    assert own.shape == theirs.shape
    for kind in KINDS:
        assert lists(own, kind) == lists(theirs, kind)
    assert own.sparsity() == theirs.sparsity()


@pytest.mark.parametrize("method", ["lpt", "headtail"])
@pytest.mark.parametrize("name", list(MASKS))
def test_on_several_ranks_too_with_columns_in_the_order_of_the_sequence(name: str, method: str):
    plan = plan_context(MASKS[name], 3, block=BLOCK, method=method)
    for rank in range(plan.ranks):
        own = made(plan, rank)
        theirs = torchs(own)
        for kind in KINDS:
            assert [sorted(row) for row in lists(own, kind)] == lists(theirs, kind)
        block_at = np.argsort(plan.layout.column_of())
        places = {int(place): block for block, place in enumerate(plan.layout.column_of())}
        assert len(block_at) == len(places)
        for row in lists(own, "kv"):
            assert [places[one] for one in row] == sorted(places[one] for one in row)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["odd"])
def test_flex_attention_with_it_is_block_rows(name: str):
    plan = plan_context(MASKS[name], 1, block=BLOCK)
    attend = Attend(plan)
    batch = ContextBatch(attend=attend)
    q, k, v = (batch.cut(one, dim=2) for one in inputs_of(MASKS[name], torch.float64)[:3])
    out = flex_attention(q, k, v, block_mask=made(plan, 0), enable_gqa=True)
    assert float((out - attend(q, k, v)).abs().max()) < 1e-13
