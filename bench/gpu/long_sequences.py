"""Times the attention of each rank over a long sequence, one rank after the other, with compiled FlexAttention.

One GPU has the keys and values of all ranks, as in Cornstarch's Table 4. A dry run uses block rows on the host.
``tests/gpu/test_context_gpu.py`` compares the kernels with dense attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu.bench import Bench
from bench.papers.masks import DRAWN
from bench.record import Figure, median_figure
from mosaic.context.attention.kernels import BlockRows, FlexKernel, Scores
from mosaic.context.plan import ContextPlan, plan_context

QUERY_HEADS, WIDTH = 8, 128
"""One key head with its query heads, as in Llama 3.1 70B."""
SCORES = Scores(WIDTH**-0.5)


def measure_long_sequences(bench: Bench, ranks: int = 8) -> Iterator[Figure]:
    """Times all ranks with ``lpt``, ``headtail`` and ``ring``; yields the slowest rank's attention."""
    tokens, block, kinds = 65536, 128, ("mp", "ee", "ep")
    if bench.dry_run:
        tokens, kinds, ranks = 512, ("mp",), 2
    for kind in kinds:
        mask = DRAWN[kind](tokens, 0)
        for method in ("lpt", "headtail", "ring"):
            if not bench.budget.allows(f"{kind}, {method}"):
                continue
            plan = plan_context(mask, ranks, block=block, method=method)
            labels = {"mask": kind, "tokens": str(tokens), "ranks": str(ranks), "method": method}
            forward, both = zip(*(_rank_ms(bench, plan, rank) for rank in range(ranks)), strict=True)
            for phase, times_ms in (("forward", forward), ("forward and backward", both)):
                slowest = max(times_ms, key=lambda samples: sorted(samples)[len(samples) // 2])
                yield median_figure(f"slowest rank's attention, {phase}, ms", slowest, labels=labels)
            yield Figure(name="most tiles over mean", source="predicted", value=plan.imbalance, labels=labels)


def _rank_ms(bench: Bench, plan: ContextPlan, rank: int) -> tuple[list[float], list[float]]:
    """Times one rank's queries over all keys and values: forward, and forward plus backward."""
    device, blocks = bench.torch_device, plan.ranks * plan.distribution.slots
    kernel = (FlexKernel if bench.on_gpu else BlockRows)(plan, rank, plan.column_of(), blocks, device)
    make = {"generator": torch.Generator(device).manual_seed(rank), "device": device}
    make["dtype"] = torch.float32 if bench.dry_run else torch.bfloat16
    q, gradient = (torch.randn(1, QUERY_HEADS, plan.local_tokens, WIDTH, **make) for _ in range(2))
    kv = torch.randn(blocks, 1, 1, plan.blocks.block, 2 * WIDTH, **make)

    def both() -> None:
        _, saved = kernel.forward(q, kv, SCORES)
        kernel.backward(saved, q, kv, gradient, SCORES)

    return _times_ms(bench, lambda: kernel.forward(q, kv, SCORES)), _times_ms(bench, both)


def _times_ms(bench: Bench, run: Callable[[], object]) -> list[float]:
    times_ms = []
    for number in range(2 if bench.dry_run else 6):
        bench.synchronize()
        began = time.perf_counter()
        run()
        bench.synchronize()
        if number:  # the first one compiles
            times_ms.append(1e3 * (time.perf_counter() - began))
    return times_ms
