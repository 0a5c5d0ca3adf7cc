"""How long planning a sequence takes on this machine, and how even ranks are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.record import Figure, median_figure
from mosaic import _search
from mosaic.context.attention.block_mask import block_mask
from mosaic.context.distribute import FINENESS, distribute, sums_by_rank
from mosaic.context.drawn import DRAWN
from mosaic.context.plan import ContextPlan
from mosaic.context.tiles import MaskBlocks

ROUNDS = 9


def planning(kind: str, tokens: int, ranks: tuple[int, ...]) -> Iterator[Figure]:
    """Each step of planning, of one drawn mask: the median of some rounds."""
    mask = DRAWN[kind](tokens, 0)
    of = f"{kind}, {tokens} tokens"
    blocks = MaskBlocks(mask=mask)
    yield _timed(f"{of}: runs and work of all blocks, ms", lambda: MaskBlocks(mask=mask).work())
    work = blocks.work()
    for count in ranks:
        at = f"{of}, {count} ranks"
        cap = -(-len(work) // count)

        def by_count(count: int = count, cap: int = cap) -> np.ndarray:
            return _search.longest_first(work, ranks=count, cap=cap)

        given = by_count()

        def trade(given: np.ndarray = given, count: int = count) -> np.ndarray:
            return _search.traded(work, given, ranks=count, fineness=FINENESS)

        yield _timed(f"{at}: longest first with equal counts, ms", by_count)
        yield _timed(f"{at}: trades, ms", trade)
        yield _timed(f"{at}: whole distribution with its chunk, ms", lambda count=count: distribute(work, count))
        for name, rank_of in (("before", given), ("after", trade())):
            sums = sums_by_rank(work, rank_of, count)
            yield Figure(
                name=f"{at}: most over mean {name} trades", source="predicted", value=float(sums.max() / sums.mean())
            )
    yield from tiles_of_one_rank(of, blocks, ranks[0])


def tiles_of_one_rank(of: str, blocks: MaskBlocks, ranks: int) -> Iterator[Figure]:
    """Tiles of one rank, and FlexAttention's mask of them with all its lists."""
    work = blocks.work()
    plan = ContextPlan(blocks=blocks, work=work, load=work, distribution=distribute(work, ranks))
    at, columns = f"{of}, one of {ranks} ranks", plan.layout.column_of()
    yield _timed(f"{at}: tiles, ms", lambda: plan.tiles(0), rounds=3)
    fetched, host = ranks * plan.distribution.slots, torch.device("cpu")
    yield _timed(f"{at}: BlockMask, ms", lambda: block_mask(plan, 0, columns, fetched, host), rounds=3)


def _timed(name: str, make: Callable[[], object], rounds: int = ROUNDS) -> Figure:
    make()
    times_ms = []
    for _ in range(rounds):
        began = time.perf_counter()
        make()
        times_ms.append(1e3 * (time.perf_counter() - began))
    return median_figure(name, times_ms)
