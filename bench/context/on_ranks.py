"""Attention's time on two gloo ranks: headtail and ours in turn, on the same masks.

Beside the time of a step that of the slower rank's core is measured, which no other process lengthens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from bench.papers.masks import multimodal_packed
from bench.ranks.launch import on_ranks
from bench.record import Figure, median_figure
from mosaic.context.attention import Attend
from mosaic.context.plan import plan_context

WAYS = {
    "headtail, all gathered": ("headtail", "gather"),
    "lpt, all gathered": ("lpt", "gather"),
    "lpt, needed blocks": ("lpt", "needed"),
}
QUERY_HEADS, HEADS, WIDTH = 8, 2, 64


def attention(tokens: int, seeds: tuple[int, ...], rounds: int, seconds: float) -> Iterator[Figure]:
    """Forward and backward of one attention layer on two ranks, each with a core."""
    for seed in seeds:
        yield from on_ranks(partial(_measured, tokens, seed, rounds), 2, seconds / len(seeds))


def _measured(tokens: int, seed: int, rounds: int, rank: int, size: int) -> Iterator[Figure]:
    mask = multimodal_packed(tokens, seed)
    ways = {}
    for way, (method, exchange) in WAYS.items():
        plan = plan_context(mask, size, method=method)
        draw = torch.Generator().manual_seed(rank)
        shapes = [(1, heads, plan.local_tokens, WIDTH) for heads in (QUERY_HEADS, HEADS, HEADS)]
        ways[way] = Attend(plan, exchange=exchange), [torch.randn(shape, generator=draw) for shape in shapes]
    times: dict[str, list[float]] = {way: [] for way in ways}
    cores: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, (attend, inputs) in ways.items():
            took, core = _step_ms(attend, inputs)
            if number:  # the first round warms up
                times[way].append(took)
                cores[way].append(core)
    for way, (attend, _) in ways.items():
        of = f"mp, {tokens} tokens, mask {seed}, 2 gloo ranks: {way}"
        yield median_figure(f"{of}: attention forward and backward, ms", times[way])
        yield median_figure(f"{of}: the slower rank's core, ms", cores[way])
        yield Figure(name=f"{of}: most tiles over mean", source="predicted", value=attend.plan.imbalance)
    for way in list(ways)[1:]:
        for what, by in (("", times), (" in the slower rank's core", cores)):
            ratios = [theirs / own for theirs, own in zip(by["headtail, all gathered"], by[way], strict=True)]
            yield median_figure(
                f"mp, {tokens} tokens, mask {seed}, 2 gloo ranks: headtail over {way}{what}, ratio", ratios
            )


def _step_ms(attend: Attend, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """The time of the slower rank, and of its core."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    dist.barrier()
    began, busy = time.perf_counter(), time.thread_time()
    attend(*leaves).sum().backward()
    core = torch.tensor([time.thread_time() - busy])
    dist.barrier()
    took = time.perf_counter() - began
    dist.all_reduce(core, op=dist.ReduceOp.MAX)
    return 1e3 * took, 1e3 * float(core)
