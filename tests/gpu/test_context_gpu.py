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
def test_compiled_attention_and_its_gradients_are_those_of_dense_attention(kind: str):
    mask = DRAWN[kind](1000, 3)
    attend = Attend(plan_context(mask, 1), device="cuda")
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
    found = [out.detach()[:, :, inverse], *(one.grad for one in own)]
    for one, other in zip(found, [dense.detach(), *(one.grad for one in whole)], strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 5e-3  # products in TF32


def test_windows_caps_and_sinks_and_their_gradients_are_those_of_the_kernel_on_cpu_cores():
    mask = DRAWN["mp"](1000, 3)
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, mask.num_tokens, 64) for count in (8, 2, 2, 8)]
    *given, gradient = [torch.randn(shape, generator=draw) for shape in shapes]
    given.append(torch.linspace(-1, 2, 8))
    found = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        batch = ContextBatch(attend=Attend(plan_context(mask, 1, windows=(200,)), device=device))
        q, k, v, sinks = own = [one.detach().to(device, dtype).requires_grad_() for one in given]
        cut = [batch.cut(one, dim=2) for one in (q, k, v)]
        out = batch.attend(*cut, window=200, softcap=2.0, sinks=sinks)
        out.backward(batch.cut(gradient.to(device, dtype), dim=2))
        found.append([one.cpu().double() for one in (out.detach(), *(one.grad for one in own))])
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 5e-3  # products in TF32
