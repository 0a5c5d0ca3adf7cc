"""How context ranks share the sequences of a module, and what ``mosaic.context``'s plan says of the rank with most.

All ranks of a group wait for each other in every layer, so the one whose attention takes longest counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mosaic.context import CONTEXT_METHODS, ContextPlan, MaskWords, causal, packed, plan_context, token_words

MAX_SHARES = 2000
"""That are remembered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSharing:
    """How the ranks along the context axis share what a module is called with.

    Raises:
        ValueError: A name is in no table, or a number is below 1.
    """

    mask: Callable[[int, int], MaskWords] | None = None
    """Of sequences whose tokens see earlier ones only, from a number of tokens and a seed; None: causal."""
    method: str = "lpt"
    """Who gets which blocks, one of ``mosaic.context``'s."""
    exchange: Literal["gather", "needed"] = "gather"
    """Whether all keys and values travel, or to each rank those that it reads."""
    heads: int = 1
    """Heads of keys and values that are fetched together."""
    items: Literal["share", "repeat", "split"] = "share"
    """Images and other sequences of modules that feed another: whole ones shared out by ``share_items`` where there are
    as many as ranks, as ``mosaic.pipeline`` does; all on every rank; or each split."""
    block: int = 128
    """Tokens given out together at least."""
    seed: int = 0
    """Of the first mask."""

    def __post_init__(self) -> None:
        tables = {
            "method": tuple(CONTEXT_METHODS),
            "exchange": ("gather", "needed"),
            "items": ("share", "repeat", "split"),
        }
        for name, table in tables.items():
            if (value := getattr(self, name)) not in table:
                raise ValueError(f"{name}={value!r}; use one of {', '.join(table)}")
        if self.heads < 1 or self.block < 1:
            raise ValueError(f"heads={self.heads}, block={self.block}; use 1 or more")


PLAIN_SHARING = ContextSharing()
"""Where nobody says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShare:
    """What context ranks do with equally long sequences, by the rank that has most of each."""

    ranks: int
    """Context ranks."""
    local_tokens: int
    """Places of each rank; some may be empty."""
    pairs: int
    """Of queries and keys, visible or in tiles with a visible one: what its attention takes time by."""
    imbalance: float
    """These over the mean of the ranks."""
    fetched_tokens: int
    """Whose keys and values are in memory, its own among them."""
    received_tokens: int
    """Of them those of other ranks."""
    sent_tokens: tuple[tuple[int, ...], ...] = ()
    """From each rank to each; empty: from all to all."""


@functools.lru_cache(maxsize=MAX_SHARES)
def share_sequences(
    sharing: ContextSharing, *, sequences: int, tokens: int, ranks: int, is_causal: bool
) -> SequenceShare:
    """Returns how ranks share sequences of ``tokens`` tokens each, packed one after the other.

    Raises:
        ValueError: There are fewer blocks than ranks.
    """
    masks = [_mask(sharing, tokens, sharing.seed + at, is_causal=is_causal) for at in range(sequences)]
    plan = plan_context(packed(masks), ranks, block=sharing.block, method=sharing.method, seed=sharing.seed)
    return share_of(plan, sharing.exchange)


def share_of(plan: ContextPlan, exchange: str) -> SequenceShare:
    """Returns what ranks do under a plan, whose keys and values are all gathered or, with ``needed``, those read."""
    ranks, block = plan.ranks, plan.blocks.block
    places = plan.layout.local_tokens if ranks > 1 else plan.layout.num_tokens
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
