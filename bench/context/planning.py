"""The time of planning a sequence on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from bench.papers.masks import DRAWN
from bench.record import Figure, median_figure
from mosaic.context.attention.kernels import block_mask
from mosaic.context.distribute import distribute
from mosaic.context.plan import ContextPlan
from mosaic.context.tiles import MaskBlocks


def planning(kind: str, tokens: int, ranks: tuple[int, ...]) -> Iterator[Figure]:
    """Counting, sharing out, and one rank's tiles with FlexAttention's mask of them, for one drawn mask."""
    mask, of = DRAWN[kind](tokens, 0), f"{kind}, {tokens} tokens"
    blocks = MaskBlocks(mask=mask)
    work = blocks.work()
    yield _timed(f"{of}: runs and work of all blocks, ms", lambda: MaskBlocks(mask=mask).work())
    for count in ranks:
        name = f"{of}, {count} ranks: whole distribution with its chunk, ms"
        yield _timed(name, lambda count=count: distribute(work, count))
    plan = ContextPlan(blocks=blocks, work=work, load=work, distribution=distribute(work, ranks[0]))
    columns, fetched = plan.column_of(), ranks[0] * plan.distribution.slots
    at = f"{of}, one of {ranks[0]} ranks"
    yield _timed(f"{at}: tiles, ms", lambda: plan.tiles(0), rounds=3)
    yield _timed(f"{at}: BlockMask, ms", lambda: block_mask(plan, 0, columns, fetched, torch.device("cpu")), rounds=3)


def _timed(name: str, make: Callable[[], object], rounds: int = 9) -> Figure:
    make()
    times_ms = []
    for _ in range(rounds):
        began = time.perf_counter()
        make()
        times_ms.append(1e3 * (time.perf_counter() - began))
    return median_figure(name, times_ms)
