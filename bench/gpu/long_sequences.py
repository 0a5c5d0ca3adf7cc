"""Attention of long sequences as each rank would compute it, by compiled FlexAttention: one rank after the other.

Keys and values of all ranks are there, as in Cornstarch's Table 4, so no other GPU is needed. In a dry run the same
code runs block rows on the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.bench import Bench
from bench.papers.masks import DRAWN
from bench.record import Figure, median_figure
from mosaic.context.attention.kernels import BlockRows, FlexKernel, Scores
from mosaic.context.plan import ContextPlan, plan_context

QUERY_HEADS, WIDTH = 8, 128
"""One head of keys with its query heads, as in Llama 3.1 70B."""


def measure_long_sequences(bench: Bench, ranks: int = 8) -> Iterator[Figure]:
    """Compares with dense attention, then times every rank of headtail, of ring, and of ours."""
    tokens, block, kinds = 65536, 128, ("mp", "ee", "ep")
    if bench.dry_run:
        tokens, kinds, ranks = 512, ("mp",), 2
    yield from _against_dense(bench, block)
    for kind in kinds:
        mask = DRAWN[kind](tokens, 0)
        for method in ("lpt", "headtail", "ring"):
            if not bench.budget.allows(f"{kind}, {method}"):
                continue
            plan = plan_context(mask, ranks, block=block, method=method)
            times_ms = [_rank_ms(bench, plan, rank) for rank in range(ranks)]
            labels = {"mask": kind, "tokens": str(tokens), "ranks": str(ranks), "method": method}
            for phase, index in (("forward", 0), ("forward and backward", 1)):
                slowest = max(
                    (times[index] for times in times_ms), key=lambda samples: sorted(samples)[len(samples) // 2]
                )
                yield median_figure(f"slowest rank's attention, {phase}, ms", slowest, labels=labels)
            yield Figure(name="most tiles over mean", source="predicted", value=plan.imbalance, labels=labels)


def _against_dense(bench: Bench, block: int) -> Iterator[Figure]:
    mask = DRAWN["mp"](512 if bench.dry_run else 2048, 1)
    plan = plan_context(mask, 1, block=block)
    local = _Local(bench, plan, 0, dtype=torch.float32)
    results = local.step(backward=True)
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in local.whole())
    order = torch.from_numpy(plan.order_of(0)).to(q.device)
    there = order >= 0
    seen = torch.from_numpy(mask.dense()).to(q.device)[order.clamp_min(0)][:, order.clamp_min(0)]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=(seen & there[:, None] & there[None, :]) | ~there[:, None], enable_gqa=True
    )
    out = out * there[:, None]
    out.backward(local.gradient)
    expected = (out, q.grad, torch.cat([k.grad, v.grad], -1))
    for name, own, other in zip(("out", "dq", "dk and dv"), results, expected, strict=True):
        other = other if name != "dk and dv" else other.unflatten(2, (-1, block)).permute(2, 0, 1, 3, 4)
        difference = float((own.detach() - other.detach()).norm() / other.detach().norm())
        yield Figure(name=f"{name}: difference from dense attention, ratio", source="measured", value=difference)


def _rank_ms(bench: Bench, plan: ContextPlan, rank: int) -> tuple[list[float], list[float]]:
    local = _Local(bench, plan, rank, dtype=torch.float32 if bench.dry_run else torch.bfloat16)
    return tuple(_times_ms(bench, local, backward=backward) for backward in (False, True))  # type: ignore[return-value]


def _times_ms(bench: Bench, local: _Local, *, backward: bool) -> list[float]:
    times_ms = []
    for number in range(2 if bench.dry_run else 6):
        bench.synchronize()
        began = time.perf_counter()
        local.step(backward=backward)
        bench.synchronize()
        if number:  # the first one compiles
            times_ms.append(1e3 * (time.perf_counter() - began))
    return times_ms


@dataclass(init=False)
class _Local:
    """One rank's queries over the keys and values of all."""

    kernel: BlockRows | FlexKernel
    q: torch.Tensor
    kv: torch.Tensor
    gradient: torch.Tensor

    def __init__(self, bench: Bench, plan: ContextPlan, rank: int, *, dtype: torch.dtype) -> None:
        device, blocks = bench.torch_device, plan.ranks * plan.distribution.slots
        kernel = FlexKernel if bench.on_gpu else BlockRows
        self.kernel = kernel(plan, rank, plan.column_of(), blocks, device)
        draw = torch.Generator(device).manual_seed(rank)
        shape = (1, QUERY_HEADS, plan.local_tokens, WIDTH)
        self.q = torch.randn(shape, generator=draw, device=device, dtype=dtype)
        self.gradient = torch.randn(shape, generator=draw, device=device, dtype=dtype)
        block = plan.blocks.block
        self.kv = torch.randn(blocks, 1, 1, block, 2 * WIDTH, generator=draw, device=device, dtype=dtype)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as dense attention takes them."""
        both = self.kv.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return self.q, both[..., :WIDTH].contiguous(), both[..., WIDTH:].contiguous()

    def step(self, *, backward: bool) -> tuple[torch.Tensor, ...]:
        scores = Scores(WIDTH**-0.5)
        out, saved = self.kernel.forward(self.q, self.kv, scores)
        if not backward:
            return (out,)
        return (out, *self.kernel.backward(saved, self.q, self.kv, out, self.gradient, scores))
