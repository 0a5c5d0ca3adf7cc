"""Attention over context ranks by compiled FlexAttention, beside dense attention in double."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.papers.masks import DRAWN
from mosaic.context.attention import Attend, ContextBatch
from mosaic.context.plan import plan_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # torch 2.11's own, by its inductor
]


@pytest.mark.parametrize("kind", ["mp", "ee", "causal"])
@pytest.mark.parametrize("heads", [1, 2])
def test_compiled_attention_and_its_gradients_are_those_of_dense_attention(kind: str, heads: int):
    mask = DRAWN[kind](1000, 3)
    attend = Attend(plan_context(mask, 1), heads=heads, device="cuda")
    batch = ContextBatch(attend=attend)
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, count, mask.num_tokens, 64) for count in (8, 2, 2, 8)]
    q, k, v, gradient = (torch.randn(shape, generator=draw, device="cuda") for shape in shapes)
    own = [one.clone().requires_grad_() for one in (q, k, v)]
    out = attend(*(batch.cut(one, dim=2) for one in own))
    out.backward(batch.cut(gradient, dim=2))
    whole = [one.double().requires_grad_() for one in (q, k, v)]
    dense = scaled_dot_product_attention(*whole, attn_mask=torch.from_numpy(mask.dense()).cuda(), enable_gqa=True)
    dense.backward(gradient.double())
    inverse = torch.from_numpy(attend.plan.order_of(0)).argsort().cuda()[-attend.plan.mask.num_tokens :]
    found = [out[:, :, inverse], *(one.grad for one in own)]
    for one, other in zip(found, [dense, *(one.grad for one in whole)], strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 5e-3  # products in TF32
