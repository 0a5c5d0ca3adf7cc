"""A counted layer on one rank of a described job: operators divided along the tensor and context axes, and messages.

Tensor parallelism with sequence parallelism is Megatron's (Korthikanti et al. 2022, arXiv 2205.05198, figure 5): each
operator and each kept activation is divided by the tensor degree. Each half of a layer gathers its input and
reduce-scatters its output. Backward does the reverse, and gathers the inputs of the first products again; that gather
and the reduce-scatter of the input's gradient run beside the products of the weights' gradients.

Context ranks have blocks of tokens, filled to one length, and share attention as ``mosaic.context`` plans it. Keys and
values of other ranks are fetched for one group of heads while the group before is computed (Llama 3, arXiv 2407.21783,
section 3.3.2). Backward fetches them again and returns their gradients in 32 bits. The rank with most pairs counts,
because all ranks wait for each other in every layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mosaic.context import CONTEXT_METHODS, MaskWords, causal, packed, plan_context, token_words
from mosaic.cost.counts import ModuleCounts, OperatorKind, PhaseCounts
from mosaic.cost.roofline import operator_ms, phase_ms
from mosaic.errors import unknown
from mosaic.pipelining.layers import Layer, Strategy
from mosaic.pipelining.rank_hardware import Degrees, RankHardware

MAX_SHARES = 2000
"""Most cached shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSharing:
    """Sharing of a module's inputs along the context axis.

    Raises:
        ValueError: The load balancer is unknown.
    """

    mask: Callable[[int, int], MaskWords] | None = None
    """Mask of causal modules, from a number of tokens and a seed; None: causal."""
    method: str = "lpt"
    """Load balancer, one of ``mosaic.context``'s."""
    items: Literal["share", "split"] = "share"
    """Images and other items of encoders: each rank has whole ones of its own if they are at least as many as ranks, as
    in ``mosaic.pipeline``; or each is split."""
    block: int = 128
    seed: int = 0
    """Seed of the first mask."""

    def __post_init__(self) -> None:
        if self.method not in CONTEXT_METHODS:
            raise ValueError(unknown("load balancer", self.method, CONTEXT_METHODS))


PLAIN_SHARING = ContextSharing()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShare:
    """Shares of context ranks in equally long sequences; each figure is of the rank with most."""

    ranks: int
    local_tokens: int
    """Places of each rank; some may be empty."""
    pairs: int
    """Pairs of queries and keys, visible or in tiles with a visible one: the load of its attention."""
    fetched_tokens: int
    """Tokens whose keys and values are in memory, including its own."""
    sent_tokens: tuple[tuple[int, ...], ...]
    """Tokens from each rank (row) to each rank (column)."""


@functools.lru_cache(maxsize=MAX_SHARES)
def share_sequences(
    sharing: ContextSharing, *, sequences: int, tokens: int, ranks: int, is_causal: bool
) -> SequenceShare:
    """Returns the shares in packed sequences of ``tokens`` tokens each.

    Raises:
        ValueError: Ranks outnumber blocks.
    """

    def mask(seed: int) -> MaskWords:
        if is_causal:
            return sharing.mask(tokens, seed) if sharing.mask is not None else causal(tokens)
        both = token_words(np.zeros(tokens, np.int64), both=True)
        return MaskWords(words=both, documents=np.zeros(tokens, np.int32))

    masks = packed([mask(sharing.seed + at) for at in range(sequences)])
    block = sharing.block
    plan = plan_context(masks, ranks, block=block, method=sharing.method, seed=sharing.seed)
    places = plan.local_tokens if ranks > 1 else plan.mask.num_tokens
    needed = plan.needed()
    owned = plan.distribution.rank_of[None, :] == np.arange(ranks)[:, None]
    blocks = owned.astype(np.int64) @ needed.T.astype(np.int64)
    np.fill_diagonal(blocks, 0)
    return SequenceShare(
        ranks=ranks,
        local_tokens=places,
        pairs=int(plan.loads.max()),
        fetched_tokens=int(needed.sum(axis=1).max()) * block,
        sent_tokens=tuple(map(tuple, (blocks * block).tolist())),
    )


HEAD_GROUPS = 8
"""Groups of heads whose keys and values are fetched one after the other."""
_PRODUCTS = (OperatorKind.MATMUL, OperatorKind.CONV)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The part of a module's data on one context rank; by default all of it."""

    rows: float = 1.0
    attention: float = 1.0
    """Share of attention's operations."""
    sequence: SequenceShare | None = None
    """Blocks of shared sequences; None: the rank has whole sequences."""
    num_tokens: int = 1
    """Tokens of all ranks together."""


WHOLE = RankShare()


def rank_share(
    sharing: ContextSharing, degrees: Degrees, *, sequences: int, tokens: int, is_causal: bool, has_items: bool
) -> RankShare:
    """Returns the part of a module's data on one context rank; sequences of encoders are whole items such as images.

    Raises:
        ValueError: Ranks outnumber blocks.
    """
    ranks, total = degrees.context, sequences * tokens
    if has_items and sharing.items != "split":
        own = -(-sequences // ranks) if sequences >= ranks else sequences
        return RankShare(rows=own / sequences, attention=own / sequences, num_tokens=total)
    if ranks == 1 and not (is_causal and sharing.mask):
        return RankShare(num_tokens=total)
    share = share_sequences(sharing, sequences=sequences, tokens=tokens, ranks=ranks, is_causal=is_causal)
    plain_pairs = total * tokens / (2 if is_causal else 1)
    return RankShare(
        rows=share.local_tokens / total, attention=share.pairs / plain_pairs, sequence=share, num_tokens=total
    )


def rank_layer(
    counts: ModuleCounts,
    machine: RankHardware,
    *,
    hidden_bytes: int,
    trains: bool,
    share: RankShare = WHOLE,
    halves: int = 2,
    may_recompute: bool = True,
    may_select: bool = False,
    may_offload: bool = False,
) -> Layer:
    """Returns a layer's times and bytes on one rank.

    Half of the time of backward's products is for weights, where these train: a product has two gradients of one size.

    Args:
        counts: The layer with all of its data on one device.
        machine: The rank.
        hidden_bytes: Bytes of the layer's input on one device.
        trains: True if its weights train.
        share: The rank's part along the context axis.
        halves: Pairs of products whose input is gathered and whose output is reduce-scattered: attention and MLP.
        may_select: True if selective recomputation of the layer is possible: it keeps the results of products and of
            attention beside the layer's input, and runs the rest again.
        may_offload: True if activations may wait in the host's memory. Copies run beside the layer; what they draw of
            the memory's bandwidth is added to it, and what it does not hide.
    """
    tensor = machine.degrees.tensor
    forward, backward = (_divided(phase, share, tensor) for phase in (counts.forward, counts.backward))
    hardware = machine.cluster.hardware
    forward_ms, backward_ms = (phase_ms(phase, hardware, hardware.num_sms) for phase in (forward, backward))
    weights_ms = _ms_of(backward, _PRODUCTS, machine) / 2 if trains else 0.0
    backward_ms = max(0.0, backward_ms - weights_ms)

    whole_bytes = round(hidden_bytes * share.rows)
    gather_ms = machine.gather_ns(whole_bytes, "tensor") / 1e6
    pass_ms = halves * gather_ms
    forward_ms += 2 * pass_ms
    backward_ms += pass_ms + (max(0.0, 2 * pass_ms - weights_ms) if trains else pass_ms)

    fetched = _fetched_ns(counts.forward, share, machine)
    if fetched is not None:
        fetch_ms, return_ms = (time_ns / 1e6 for time_ns in fetched)
        forward_ms += _exposed_ms(fetch_ms, _ms_of(forward, (OperatorKind.ATTENTION,), machine))
        backward_ms += _exposed_ms(fetch_ms + return_ms, _ms_of(backward, (OperatorKind.ATTENTION,), machine))

    kept_bytes = round(counts.memory.activation_bytes * share.rows / tensor)
    gathered_bytes = whole_bytes if tensor > 1 else 0
    fetched_bytes = 0 if fetched is None else 6 * _key_bytes(counts.forward, share, tensor) // HEAD_GROUPS
    input_bytes = min(kept_bytes, whole_bytes // tensor)
    strategies = [Strategy(name="keep", kept_bytes=kept_bytes)]
    if may_recompute:
        strategies.append(Strategy(name="recompute", kept_bytes=input_bytes, extra_backward_ms=forward_ms))
    if may_select:
        kinds = (*_PRODUCTS, OperatorKind.ATTENTION)
        results_bytes = sum(each.calls * each.written_bytes for each in forward.of_kind(*kinds))
        strategies.append(
            Strategy(
                name="selective",
                kept_bytes=min(kept_bytes, input_bytes + results_bytes),
                extra_backward_ms=max(0.0, forward_ms - _ms_of(forward, kinds, machine)),
            )
        )
    if may_offload and hardware.host_gb_per_s:
        copy_ms = kept_bytes / hardware.host_gb_per_s / 1e6
        drawn_ms = kept_bytes / hardware.memory_gb_per_s / 1e6  # of the bandwidth that kernels use meanwhile
        strategies.append(
            Strategy(
                name="offload",
                kept_bytes=0,
                extra_forward_ms=max(0.0, copy_ms - forward_ms) + drawn_ms,
                extra_backward_ms=max(0.0, copy_ms - backward_ms) + drawn_ms,
                workspace_bytes=kept_bytes,
            )
        )
    return Layer(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        weights_ms=weights_ms,
        strategies=tuple(strategies),
        workspace_bytes=round(counts.memory.workspace_bytes * share.rows / tensor) + gathered_bytes + fetched_bytes,
    )


def _divided(phase: PhaseCounts, share: RankShare, tensor: int) -> PhaseCounts:
    if tensor == 1 and share.rows == share.attention == 1:
        return phase
    operators = []
    for operator in phase.operators:
        part = (share.attention if operator.kind is OperatorKind.ATTENTION else share.rows) / tensor
        read, written = (num * share.rows / tensor for num in (operator.read_bytes, operator.written_bytes))
        flops = round(operator.flops * part)
        operators.append(replace(operator, flops=flops, read_bytes=round(read), written_bytes=round(written)))
    return PhaseCounts(operators=tuple(operators))


def _ms_of(phase: PhaseCounts, kinds: tuple[OperatorKind, ...], machine: RankHardware) -> float:
    hardware = machine.cluster.hardware
    return sum(each.calls * operator_ms(each, hardware, hardware.num_sms) for each in phase.of_kind(*kinds))


def _exposed_ms(fetch_ms: float, compute_ms: float) -> float:
    """Returns the time that fetching adds: that of the first group, and what computing does not hide."""
    return fetch_ms / HEAD_GROUPS + max(0.0, fetch_ms - compute_ms) * (1 - 1 / HEAD_GROUPS)


def _key_bytes(forward: PhaseCounts, share: RankShare, tensor: int) -> int:
    """Returns the bytes of fetched keys and values: inputs of attention beside queries, as large as its output."""
    keys = sum(
        each.calls * max(0, each.read_bytes - each.written_bytes) for each in forward.of_kind(OperatorKind.ATTENTION)
    )
    assert share.sequence is not None
    return round(keys * share.sequence.fetched_tokens / share.num_tokens / tensor)


def _fetched_ns(forward: PhaseCounts, share: RankShare, machine: RankHardware) -> tuple[int, int] | None:
    """Returns the times of all keys and values, and of their gradients, which have twice the bytes."""
    sequence = share.sequence
    if sequence is None or sequence.ranks == 1:
        return None
    if not (key_bytes := _key_bytes(forward, share, machine.degrees.tensor)):
        return None

    def exchange_ns(rows: tuple[tuple[int, ...], ...], token_bytes: float) -> int:
        return machine.exchange_ns(tuple(tuple(round(token_bytes * count) for count in row) for row in rows))

    per_token = key_bytes / max(1, sequence.fetched_tokens)
    back = tuple(zip(*sequence.sent_tokens, strict=True))
    return exchange_ns(sequence.sent_tokens, per_token), exchange_ns(back, 2 * per_token)
