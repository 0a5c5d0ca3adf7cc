"""Cornstarch's Table 4 and Fig. 12, predicted: one attention layer of Llama 3.1 70B on 8 ranks.

The time of a rank is that of its tiles of 128 by 128 on the described device; keys and values are there, as in the
paper's measurement. Which lengths the paper's masks have it does not print, so ours are drawn otherwise, and ratios to
its own LPT are what can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bench.record import Figure
from mosaic.context.distribute import distribute, sums_by_rank
from mosaic.context.drawn import DRAWN
from mosaic.context.tiles import MaskBlocks
from mosaic.hardware.find import find_hardware

HEADS, WIDTH, BLOCK = 64, 128, 128
WAYS = {"LPT": "lpt-paper", "ours": "lpt", "random": "random", "naive ring": "ring", "zigzag": "zigzag"}


def table_4(kind: str, tokens: int, ranks: int, masks: int, device: str = "a40") -> Iterator[Figure]:
    """Attention time of the slowest rank, mean of drawn masks, and over the paper's LPT."""
    hardware = find_hardware(device)
    flops = 4 * HEADS * WIDTH * BLOCK * BLOCK  # scores and output of a tile, a multiplication and an addition each
    tile_ms = 1e3 * flops / (hardware.bf16_tflops * 1e12 * hardware.efficiency.attention)
    times: dict[str, list[float]] = {}
    for seed in range(masks):
        blocks = MaskBlocks(mask=DRAWN[kind](tokens, seed), block=BLOCK)
        work, rows = blocks.work(), blocks.tile_pairs() // BLOCK**2
        for way, method in WAYS.items():
            counted = rows if way == "ours" else work  # short sequences are balanced by tiles
            shared = distribute(counted, ranks, method, chunk=1, seed=seed)
            times.setdefault(way, []).append(tile_ms * float(sums_by_rank(rows, shared.rank_of, ranks).max()))
    labels = {"masks": str(masks), "device": hardware.name, "efficiency": f"{hardware.efficiency.attention:g}"}
    for way, values in times.items():
        of = f"Cornstarch Table 4: {kind.upper()}, {tokens} tokens, {way}"
        mean = float(np.mean(values))
        yield Figure(name=f"{of}: attention, ms", source="predicted", value=mean, labels=labels)
        yield Figure(
            name=f"{of}: over LPT, ratio", source="predicted", value=mean / float(np.mean(times["LPT"])), labels=labels
        )


def figure_12(kind: str, tokens: int, ranks: int) -> Iterator[Figure]:
    """One mask: the slowest rank's tiles over the fastest one's, by each way."""
    blocks = MaskBlocks(mask=DRAWN[kind](tokens, 0), block=BLOCK)
    work, rows = blocks.work(), blocks.tile_pairs() // BLOCK**2
    for way, method in WAYS.items():
        shared = distribute(rows if way == "ours" else work, ranks, method, chunk=1)
        sums = sums_by_rank(rows, shared.rank_of, ranks)
        yield Figure(
            name=f"Cornstarch Fig. 12: {kind.upper()}, {tokens} tokens, {way}: slowest over fastest rank, ratio",
            source="predicted",
            value=float(sums.max() / sums.min()),
            samples=tuple(float(one) for one in sums),
        )
