"""Attention on two gloo ranks: headtail and ours in turn, on the same masks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from bench.papers.masks import multimodal_packed
from bench.ranks.launch import on_ranks
from bench.record import Figure, median_figure
from mosaic.context.attention import Attend
from mosaic.context.plan import plan_context
from mosaic.take_turns import take_turns

METHODS = ("headtail", "lpt")
QUERY_HEADS, HEADS, WIDTH = 8, 2, 64


def attention(tokens: int, seeds: tuple[int, ...], rounds: int, seconds: float) -> Iterator[Figure]:
    """Forward and backward of one attention layer on two ranks with one core each."""
    for seed in seeds:
        yield from on_ranks(partial(_measured, tokens, seed, rounds), 2, seconds / len(seeds))


def _measured(tokens: int, seed: int, rounds: int, rank: int, size: int) -> Iterator[Figure]:
    mask, draw = multimodal_packed(tokens, seed), torch.Generator().manual_seed(rank)
    plans = {f"{method}, needed blocks": plan_context(mask, size, method=method) for method in METHODS}
    steps = {}
    for variant, plan in plans.items():
        shapes = [(1, heads, plan.local_tokens, WIDTH) for heads in (QUERY_HEADS, HEADS, HEADS)]
        inputs = [torch.randn(shape, generator=draw) for shape in shapes]
        steps[variant] = partial(_step_ms, Attend(plan), inputs)
        steps[variant]()  # warms up
    for variant, turns in take_turns(steps, range(rounds)).items():
        of = f"mp, {tokens} tokens, mask {seed}, 2 gloo ranks: {variant}"
        yield median_figure(f"{of}: attention forward and backward, ms", list(chain(*turns)))


def _step_ms(attend: Attend, inputs: list[torch.Tensor]) -> tuple[float]:
    """Returns the time of the slower rank, one sample per turn."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    dist.barrier()
    began = time.perf_counter()
    attend(*leaves).sum().backward()
    dist.barrier()
    return (1e3 * (time.perf_counter() - began),)
