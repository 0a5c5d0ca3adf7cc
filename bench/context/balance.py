"""Planning time, balance of ranks by method, and received bytes relative to gathering everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.papers.masks import DRAWN
from bench.record import Figure, median_figure
from mosaic import _search
from mosaic.context.attention.kernels import block_mask
from mosaic.context.distribute import CONTEXT_METHODS, Distribution, distribute
from mosaic.context.plan import MAX_TILED_BLOCKS, ContextPlan
from mosaic.context.tiles import MaskBlocks, Work

COMPARED = tuple(CONTEXT_METHODS)


def balance(kind: str, tokens: int, ranks: int, masks: int) -> Iterator[Figure]:
    """Yields the imbalance on several random masks, in visible pairs and in tiles.

    Ours balances the load of ``plan_context``, the paper's method pairs, torch's tiles.
    """
    values_of: dict[tuple[str, str], list[float]] = {}
    for seed in range(masks):
        blocks = MaskBlocks(mask=DRAWN[kind](tokens, seed))
        pairs, tiles = blocks.work(), blocks.tile_pairs()
        ours = tiles if blocks.num_blocks <= MAX_TILED_BLOCKS else pairs
        shared = [distribute(pairs, ranks, name, seed=seed) for name in COMPARED if name != "lpt"]
        shared += [_as_printed(pairs, ranks), distribute(ours, ranks, chunk=1), _ptrr(tiles // blocks.block**2, ranks)]
        for distribution in shared:
            values_of.setdefault((distribution.method, "pairs"), []).append(distribution.imbalance(pairs))
            values_of.setdefault((distribution.method, "tiles"), []).append(distribution.imbalance(tiles))
    for (method, unit), values in values_of.items():
        yield _spread(f"{kind}, {tokens} tokens, {ranks} ranks: {method}: most {unit} over mean", values)


def _as_printed(pairs: Work, ranks: int) -> Distribution:
    """Cornstarch's Algorithm 2: the longest first to the rank with the least load, without equal counts."""
    rank_of = _search.longest_first(pairs, ranks=ranks, cap=len(pairs))
    return Distribution(rank_of=rank_of, ranks=ranks, chunk=1, method="lpt-paper")


def _ptrr(tiles: Work, ranks: int) -> Distribution:
    """Torch's load balancer, which counts tiles of each row."""
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PTRRLoadBalancer

    rank_of = np.empty(len(tiles), np.int32)
    for rank, own in enumerate(_PTRRLoadBalancer.ptrr_scheduling(torch.from_numpy(tiles), ranks).numpy()):
        rank_of[own] = rank
    return Distribution(rank_of=rank_of, ranks=ranks, chunk=1, method="torch's PTRR")


def received(name: str, draw: Callable[[int], MaskBlocks], ranks: int, masks: int) -> Iterator[Figure]:
    """Keys and values that a rank receives, as a share of gathering all, by chunk and for headtail."""
    shares: dict[str, list[tuple[float, float]]] = {}
    for seed in range(masks):
        blocks = draw(seed)
        work = blocks.work()
        variants = {f"lpt, chunks of {chunk * blocks.block}": ("lpt", chunk) for chunk in (1, 4, 16)}
        variants |= {"lpt, chunk chosen": ("lpt", None), "headtail": ("headtail", 1)}
        for variant, (method, chunk) in variants.items():
            shared = distribute(work, ranks, method, chunk=chunk)
            plan = ContextPlan(blocks=blocks, load=work, distribution=shared)
            mean = plan.received_blocks(plan.needed()).mean() / plan.received_blocks()[0]
            shares.setdefault(variant, []).append((float(mean), plan.imbalance))
    for variant, values in shares.items():
        of = f"{name}, {ranks} ranks, {variant}"
        yield _spread(f"{of}: received over gathering all, mean of ranks", [share for share, _ in values])
        yield _spread(f"{of}: most pairs over mean", [imbalance for _, imbalance in values])


def _spread(name: str, values: list[float]) -> Figure:
    """Mean of several masks, with the smallest and the largest value."""
    return Figure(
        name=name,
        source="predicted",
        value=float(np.mean(values)),
        samples=tuple(values),
        labels={"worst": f"{max(values):.6g}", "masks": str(len(values))},
    )


def planning(kind: str, tokens: int, ranks: tuple[int, ...]) -> Iterator[Figure]:
    """Times counting, balancing, and one rank's tiles and FlexAttention mask, for one random mask."""
    mask, of = DRAWN[kind](tokens, 0), f"{kind}, {tokens} tokens"
    blocks = MaskBlocks(mask=mask)
    work = blocks.work()
    yield _timed(f"{of}: runs and work of all blocks, ms", lambda: MaskBlocks(mask=mask).work())
    for count in ranks:
        name = f"{of}, {count} ranks: whole distribution with its chunk, ms"
        yield _timed(name, lambda count=count: distribute(work, count))
    plan = ContextPlan(blocks=blocks, load=work, distribution=distribute(work, ranks[0]))
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
