"""Shares of context ranks in the sequences of a module, by ``mosaic.context``'s plan.

All ranks of a group wait for each other in every layer, so the rank with the longest attention counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mosaic.context import CONTEXT_METHODS, ContextPlan, MaskWords, causal, packed, plan_context, token_words

MAX_SHARES = 2000
"""Most cached shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSharing:
    """Sharing of a module's inputs along the context axis.

    Raises:
        ValueError: A name is unknown, or a number is below 1.
    """

    mask: Callable[[int, int], MaskWords] | None = None
    """Mask of causal modules, from a number of tokens and a seed; None: causal."""
    method: str = "lpt"
    """Load balancer, one of ``mosaic.context``'s."""
    exchange: Literal["gather", "needed"] = "gather"
    """All keys and values, or those that each rank reads (``needed``)."""
    items: Literal["share", "repeat", "split"] = "share"
    """Images and other items of encoders: each rank has whole ones of its own if they are at least as many as ranks, as
    in ``mosaic.pipeline``; all are on every rank; or each is split."""
    block: int = 128
    """Tokens of a block."""
    seed: int = 0
    """Seed of the first mask."""

    def __post_init__(self) -> None:
        tables = {
            "method": tuple(CONTEXT_METHODS),
            "exchange": ("gather", "needed"),
            "items": ("share", "repeat", "split"),
        }
        for name, table in tables.items():
            if (value := getattr(self, name)) not in table:
                raise ValueError(f"{name}={value!r}; use one of {', '.join(table)}")
        if self.block < 1:
            raise ValueError(f"block={self.block}; use 1 or more")


PLAIN_SHARING = ContextSharing()
"""Default sharing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShare:
    """Shares of context ranks in equally long sequences; each figure is of the rank with most."""

    ranks: int
    """Context ranks."""
    local_tokens: int
    """Places of each rank; some may be empty."""
    pairs: int
    """Pairs of queries and keys, visible or in tiles with a visible one: the load of its attention."""
    imbalance: float
    """Pairs over the mean of the ranks."""
    fetched_tokens: int
    """Tokens whose keys and values are in memory, including its own."""
    received_tokens: int
    """Those of other ranks among them."""
    sent_tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens from each rank (row) to each rank (column); empty: all to all."""


@functools.lru_cache(maxsize=MAX_SHARES)
def share_sequences(
    sharing: ContextSharing, *, sequences: int, tokens: int, ranks: int, is_causal: bool
) -> SequenceShare:
    """Returns the shares in packed sequences of ``tokens`` tokens each.

    Raises:
        ValueError: Ranks outnumber blocks.
    """
    masks = [_mask(sharing, tokens, sharing.seed + at, is_causal=is_causal) for at in range(sequences)]
    plan = plan_context(packed(masks), ranks, block=sharing.block, method=sharing.method, seed=sharing.seed)
    return share_of(plan, sharing.exchange)


def share_of(plan: ContextPlan, exchange: str) -> SequenceShare:
    """Returns the shares of a plan whose keys and values are all gathered or, with ``needed``, only those read."""
    ranks, block = plan.ranks, plan.blocks.block
    places = plan.local_tokens if ranks > 1 else plan.mask.num_tokens
    needed = plan.needed() if exchange == "needed" and ranks > 1 else None
    return SequenceShare(
        ranks=ranks,
        local_tokens=places,
        pairs=int(plan.loads.max()),
        imbalance=plan.imbalance,
        fetched_tokens=ranks * places if needed is None else int(needed.sum(axis=1).max()) * block,
        received_tokens=int(plan.received_blocks(needed).max()) * block,
        sent_tokens=() if needed is None else _sent(plan, needed),
    )


def _mask(sharing: ContextSharing, tokens: int, seed: int, *, is_causal: bool) -> MaskWords:
    if is_causal:
        return sharing.mask(tokens, seed) if sharing.mask is not None else causal(tokens)
    both = token_words(np.zeros(tokens, np.int64), both=True)
    return MaskWords(words=both, documents=np.zeros(tokens, np.int32))


def _sent(plan: ContextPlan, needed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[tuple[int, ...], ...]:
    owned = plan.distribution.rank_of[None, :] == np.arange(plan.ranks)[:, None]
    blocks = owned.astype(np.int64) @ needed.T.astype(np.int64)
    np.fill_diagonal(blocks, 0)
    return tuple(tuple(row) for row in (blocks * plan.blocks.block).tolist())
