"""The study of long sequences over ranks: measured planning and attention, counted balance and bytes.

``python -m bench.context [--quick] [--json FILE]``

Random masks are causal, encoder outputs prepended (EP) or embedded (EE), or packed documents of these (MP). Work is
visible pairs. Attention is measured on two gloo ranks with one core each. ``--quick``: short sequences, within a
minute.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

from bench.context import balance, on_ranks
from bench.harness import PartedStudy, StudyPart
from bench.papers.masks import DRAWN, embedded, multimodal_packed
from mosaic.context.tiles import MaskBlocks

MILLION = 1 << 20
MIXED = ("ep", "ee", "mp")


def packed_blocks(tokens: int, document_tokens: int, seed: int) -> MaskBlocks:
    return MaskBlocks(mask=multimodal_packed(tokens, seed, document_tokens))


def embedded_blocks(tokens: int, seed: int) -> MaskBlocks:
    return MaskBlocks(mask=embedded(tokens, seed))


def received(tokens: int, ranks: tuple[int, ...], masks: int) -> StudyPart:
    """Describes the traffic of short and of long documents, and of one document."""
    draws = {
        f"mp of ~4k, {tokens} tokens": partial(packed_blocks, tokens, 4096),
        f"mp of ~16k, {tokens} tokens": partial(packed_blocks, tokens, 16384),
        f"ee, {tokens} tokens": partial(embedded_blocks, tokens),
    }
    return StudyPart.alone(
        "bytes",
        100,
        lambda: chain(*(balance.received(name, draw, count, masks) for name, draw in draws.items() for count in ranks)),
    )


QUICK = (
    StudyPart.alone("planning", 20, lambda: chain(*(balance.planning(kind, 1 << 17, (8,)) for kind in DRAWN))),
    StudyPart.alone("balance", 20, lambda: chain(*(balance.balance(kind, 1 << 14, 8, 3) for kind in MIXED))),
    received(1 << 16, (8,), 1),
    StudyPart(name="two ranks", make=lambda left: on_ranks.attention(2048, (0,), 3, left), seconds=30),
)
FULL = (
    StudyPart.alone("planning", 90, lambda: chain(*(balance.planning(kind, MILLION, (8, 64)) for kind in DRAWN))),
    StudyPart.alone(
        "balance",
        120,
        lambda: chain(
            *(balance.balance(kind, MILLION, ranks, 5) for kind in MIXED for ranks in (8, 64)),
            *(balance.balance(kind, 16384, 8, 50) for kind in MIXED),
        ),
    ),
    received(1 << 18, (8, 32), 3),
    StudyPart(name="two ranks", make=lambda left: on_ranks.attention(8192, (0, 1, 2), 7, left), seconds=150),
)
STUDY = PartedStudy(name="bench_context", quick=lambda: QUICK, quick_seconds=60.0, full=lambda: FULL)

if __name__ == "__main__":
    STUDY.main(__doc__, "short sequences; within a minute on two cores")
