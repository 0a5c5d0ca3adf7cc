"""Sequences to attend over, and what dense attention makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from mask_matrices import odd_mask
from torch.nn.functional import scaled_dot_product_attention

from bench.papers.masks import DRAWN
from mosaic.context.attention import Attend, ContextBatch
from mosaic.context.plan import ContextPlan, plan_context
from mosaic.context.words import MaskWords, causal, gemma, packed

BLOCK = 32
Tensors = tuple[torch.Tensor, ...]


def gemma_packed() -> MaskWords:
    """Two of Gemma's documents, one causal, and padding."""
    images = np.array([-1] * 20 + [0] * 30 + [-1] * 11 + [1] * 25)
    return packed([gemma(images), causal(70), gemma(images[::-1])], num_tokens=260)


MASKS: dict[str, MaskWords] = {
    "causal": causal(200),
    "ee": DRAWN["ee"](200, 2),
    "gemma, packed, padded": gemma_packed(),
    "odd": odd_mask(5, 230),
}


@dataclass(frozen=True)
class Case:
    """How one sequence is shared out and attended over."""

    mask: str
    method: str

    def plan(self, ranks: int) -> ContextPlan:
        return plan_context(MASKS[self.mask], ranks, block=BLOCK, method=self.method)


def cases() -> Iterator[Case]:
    """Every mask by every way of sharing it out."""
    for mask in MASKS:
        for method in ("lpt", "headtail", *(("random", "ring") if mask == "odd" else ())):
            yield Case(mask, method)


def inputs_of(mask: MaskWords, dtype: torch.dtype) -> Tensors:
    """q, k, v and the gradient of the output, of the whole sequence: six heads on two, values wider than keys."""
    draw = torch.Generator().manual_seed(mask.num_tokens)
    shapes = ((6, 8), (2, 8), (2, 12), (6, 12))
    return tuple(torch.randn(2, heads, mask.num_tokens, width, generator=draw).to(dtype) for heads, width in shapes)


def dense(mask: MaskWords, given: Tensors) -> Tensors:
    """Output, dq, dk and dv by torch's dense attention."""
    q, k, v = (one.clone().requires_grad_() for one in given[:3])
    out = scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(mask.dense()), enable_gqa=True)
    out.backward(given[3])
    return tuple(one.detach() for one in (out, q.grad, k.grad, v.grad))


def attended(attend: Attend, given: Tensors) -> Tensors:
    """The same of a rank's tokens, where they lie in the whole sequence; 0 elsewhere."""
    batch = ContextBatch(attend=attend)
    q, k, v = (one.clone().requires_grad_() for one in given[:3])
    out = attend(*(batch.cut(one, dim=2) for one in (q, k, v)))
    out.backward(batch.cut(given[3], dim=2))
    order = torch.from_numpy(attend.plan.order_of(attend.rank))
    whole = torch.zeros_like(given[3])
    whole[:, :, order[order >= 0]] = out.detach()[:, :, order >= 0]
    assert not out.detach()[:, :, order < 0].any()
    return whole, q.grad, k.grad, v.grad
