from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import BLOCK, MASKS, attended, inputs_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mosaic.context.attention import Attend, ContextBatch, kernels
from mosaic.context.attention.kernels import FlexKernel, block_mask
from mosaic.context.plan import ContextPlan, plan_context

KINDS = ("kv", "full_kv", "q", "full_q")


def made(plan: ContextPlan, rank: int) -> BlockMask:
    columns = plan.ranks * plan.distribution.slots
    return block_mask(plan, rank, plan.column_of(), columns, torch.device("cpu"))


def torchs(own: BlockMask) -> BlockMask:
    return create_block_mask(own.mask_mod, None, None, *own.seq_lengths, device="cpu", BLOCK_SIZE=own.BLOCK_SIZE)


def lists(mask: BlockMask, kind: str) -> list[list[int]]:
    counts, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
    return [row[:count].tolist() for row, count in zip(indices, counts.tolist(), strict=True)]


@pytest.mark.parametrize("method", ["lpt", "headtail"])
@pytest.mark.parametrize("name", list(MASKS))
def test_on_several_ranks_too_with_columns_in_the_order_of_the_sequence(name: str, method: str):
    plan = plan_context(MASKS[name], 3, block=BLOCK, method=method)
    for rank in range(plan.ranks):
        own = made(plan, rank)
        theirs = torchs(own)
        for kind in KINDS:
            assert [sorted(row) for row in lists(own, kind)] == lists(theirs, kind)
        places = {int(place): block for block, place in enumerate(plan.column_of())}
        for row in lists(own, "kv"):
            assert [places[one] for one in row] == sorted(places[one] for one in row)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("options", [{}, {"window": 50, "softcap": 0.7, "sinks": True}], ids=str)
def test_flex_attention_is_block_rows(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    plan, name = plan_context(MASKS["odd"], 1, block=BLOCK), "odd"
    if "sinks" in options:
        options = options | {"sinks": torch.linspace(-1, 2, 6, dtype=torch.float64)}
    rows, flex = Attend(plan), Attend(plan)
    batch = ContextBatch(attend=rows)
    q, k, v = (batch.cut(one, dim=2) for one in inputs_of(MASKS[name], torch.float64)[:3])
    own = plan.windowed(options.get("window"))
    columns, slots = own.column_of(), own.distribution.slots
    monkeypatch.setattr(kernels, "compiled_attention", lambda: forward_only)
    kernel = FlexKernel(own, 0, columns, slots, torch.device("cpu"))
    flex.layers[options.get("window")] = replace(flex.layer(None), kernel=kernel)
    assert float((flex(q, k, v, **options) - rows(q, k, v, **options)).abs().max()) < 1e-13


def forward_only(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """FlexAttention, which refuses tensors with gradients on CPU cores."""
    return flex_attention(q.detach(), k.detach(), v.detach(), **options)


def dense(q: Any, k: Any, v: Any, *, block_mask: BlockMask, scale: float, enable_gqa: bool) -> torch.Tensor:
    """Stands in for FlexAttention, which has no backward pass here; a head of queries for each of keys."""
    assert enable_gqa
    seen = block_mask.mask_mod(None, None, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None])
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -1e30)
    return (scores.softmax(-1) @ v) * seen.any(-1)[:, None]


def test_its_graph_keeps_no_keys_and_values_and_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch):
    plan = plan_context(MASKS["odd"], 1, block=BLOCK)
    q, k, v, gradient = inputs_of(MASKS["odd"], torch.float64)
    attend, given = Attend(plan), (q[:, :2], k, v, gradient[:, :2])
    expected = attended(attend, given)
    packed = []
    pack = kernels._Tape._pack
    monkeypatch.setattr(kernels._Tape, "_pack", lambda tape, one: packed.append(pack(tape, one)) or packed[-1])
    fetched, halves = [], kernels._halves
    monkeypatch.setattr(kernels, "_halves", lambda *given: fetched.append(halves(*given)) or fetched[-1])
    monkeypatch.setattr(kernels, "compiled_attention", lambda: dense)
    columns = plan.column_of()
    kernel = FlexKernel(plan, 0, columns, plan.distribution.slots, torch.device("cpu"))
    attend.layers[None] = replace(attend.layer(None), kernel=kernel)
    found = attended(attend, given)
    assert max(float((own - other).abs().max()) for own, other in zip(found, expected, strict=True)) < 1e-13
    handed_over = [one for one in packed if not isinstance(one, torch.Tensor)]
    assert {one[0] for one in handed_over} == {0, 1}
    like_keys = [one for one in packed if isinstance(one, torch.Tensor) and one.numel() == 2 * plan.local_tokens * 8]
    assert len(like_keys) == 2  # the queries of each head
    assert [one.untyped_storage().nbytes() for one in fetched[0]] == [0, 0]  # those of the forward pass
