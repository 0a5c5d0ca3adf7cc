"""Fused attention itself, on one rank or shared by context ranks.

Context ranks share it as ``mosaic.context.attention.attend`` does (Llama 3, arXiv 2407.21783, section 3.3.2;
Cornstarch, section 5.3): queries stay, keys and values of other ranks are fetched, one group of heads while another
group is computed. Backward fetches them again and returns their gradients in 32 bits. The rank with most pairs counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.pipelining.semu.rank_hardware import Collective, Exchange
from mosaic.pipelining.workload.layer_steps import ITEM_BYTES, Fetched, LayerStep, attention_of
from mosaic.pipelining.workload.sequence_share import SequenceShare

GRADIENT_BYTES = 4
"""Bytes of a number that is summed over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """An attention on one rank."""

    flops: int
    """Operations of forward, over all heads."""
    sequences: int
    """Separate products for each head."""
    rows: int
    """Queries."""
    keys: int
    """Tokens with keys and values."""
    heads: int
    """Heads of queries."""
    head_dim: int
    """Width of a head."""
    key_heads: int
    """Heads of keys, and as many of values."""

    def step(self, name: str, sources: tuple[str, ...], fetched: Fetched | None = None) -> LayerStep:
        """Returns its step; beside its output it keeps 4 bytes for each head and token."""
        groups = 1 if fetched is None else fetched.groups
        width = self.heads * self.head_dim
        read = (self.rows * width + 2 * self.key_heads * self.head_dim * self.keys) * ITEM_BYTES // groups
        out = self.rows * width * ITEM_BYTES + self.rows * self.heads * 4
        shape = self.sequences * self.heads // groups, self.rows // self.sequences
        flops, written = self.flops // groups, out // groups
        return LayerStep(
            name=name,
            forward=attention_of(flops, read, written, *shape, calls=groups),
            reads=sources,
            writes=f"{name} core",
            num_bytes=out,
            backward=(attention_of(flops * 5 // 2, 2 * read + 2 * written, read, *shape, calls=groups),),
            saved=(*sources, f"{name} core"),
            fetched=fetched,
        )


def fetched_keys(name: str, share: SequenceShare, *, key_heads: int, head_dim: int, heads: int) -> Fetched:
    """Returns the keys and values that an attention fetches from other context ranks.

    Args:
        name: Name of the attention.
        share: Share of the ranks.
        key_heads: Heads of keys and of values on this tensor-parallel rank.
        head_dim: Width of a head.
        heads: Heads fetched together.

    Raises:
        ValueError: ``heads`` does not divide the heads of keys.
    """
    if key_heads % heads:
        fit = [count for count in range(1, key_heads + 1) if key_heads % count == 0]
        raise ValueError(f"heads={heads} does not divide {key_heads} heads of keys; use one of {fit}")
    numbers = 2 * heads * head_dim
    return Fetched(
        groups=key_heads // heads,
        fetch=_message(f"{name} keys", share, numbers * ITEM_BYTES, back=False),
        give_back=_message(f"{name} keys backward", share, numbers * GRADIENT_BYTES, back=True),
        num_bytes=share.fetched_tokens * numbers * ITEM_BYTES,
        received_bytes=share.received_tokens * numbers * ITEM_BYTES,
        gradient_bytes=share.fetched_tokens * numbers * GRADIENT_BYTES,
    )


def _message(name: str, share: SequenceShare, token_bytes: int, *, back: bool) -> Collective | Exchange:
    if not share.sent_tokens:
        return Collective(name=name, num_bytes=share.fetched_tokens * token_bytes, axis="context")
    sent = zip(*share.sent_tokens, strict=True) if back else share.sent_tokens
    return Exchange(name=name, sent_bytes=tuple(tuple(count * token_bytes for count in row) for row in sent))
