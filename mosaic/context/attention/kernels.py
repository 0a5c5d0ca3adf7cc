"""Kernels of local attention: plain torch row by row, on any device, and compiled FlexAttention, on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mosaic.context.attention.exchange import Alone
from mosaic.context.plan import ContextPlan
from mosaic.context.tiles import Tiles
from mosaic.context.words import BOTH, PADDING, STREAM_SHIFT


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one call: products of queries and keys, scaled and maybe capped (Gemma 2's soft cap)."""

    scale: float
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One block of queries with visible keys."""

    slot: int
    """Place among the rank's blocks."""
    columns: torch.Tensor
    """Places of its visible blocks of keys, in the order of the sequence."""
    hidden: tuple[tuple[int, torch.Tensor], ...]
    """Place in ``columns`` and hidden pairs, (block, block), of each partially visible tile."""


class BlockRows:
    """Exact attention, one block of queries at a time, with a backward pass, which FlexAttention lacks on CPU cores.

    Each block of queries reads its blocks of keys in the order of the sequence, so its output and the gradient of its
    queries have the same bits on any number of ranks.
    """

    def __init__(
        self, plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
    ) -> None:
        self._block, self._rows = plan.blocks.block, []
        tiles = plan.tiles(rank)
        for slot, row in enumerate(plan.distribution.blocks_of(rank)):
            own = slice(tiles.offsets[slot], tiles.offsets[slot + 1])
            columns, is_full = tiles.columns[own], tiles.is_full[own]
            if not len(columns):
                continue
            hidden = tuple(
                (int(place), torch.from_numpy(_hidden(plan, int(row), int(columns[place]))).to(device))
                for place in np.flatnonzero(is_full == 0)
            )
            places = torch.from_numpy(column_of[columns].astype(np.int64)).to(device)
            self._rows.append(_Row(slot, places, hidden))

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, scores: Scores, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output of one group of heads, and the logarithms of its sums for the backward pass.

        Args:
            q: Shape (batch, query heads, local tokens, width).
            kv: Fetched blocks of keys and values, shape (blocks, batch, heads, block, width + value width).
            scores: Scale and cap of the scores.
            sinks: Shape (query heads,): a score of each head that takes a share and adds no value (GPT-OSS).
        """
        width = q.shape[-1]
        folded = self._folded(q, kv)
        out = folded.new_zeros(*folded.shape[:-1], kv.shape[-1] - width)
        weight = folded.new_zeros(folded.shape[:-1])  # logarithm of the sum of exponentials
        sink = self._folded_sinks(sinks, folded)
        for row in self._rows:
            k, v = self._keys(kv, row, width)
            seen, _ = self._scores(folded[row.slot], k, row, scores)
            most = seen.amax(-1, keepdim=True).clamp_min(torch.finfo(seen.dtype).min)  # finite if all are hidden
            most = most if sink is None else torch.maximum(most, sink)
            shares = (seen - most).exp()
            total = shares.sum(-1, keepdim=True)
            total = total if sink is None else total + (sink - most).exp()
            out[row.slot] = torch.where(total > 0, (shares @ v) / total, 0)
            weight[row.slot] = torch.where(total > 0, most + total.log(), 0).squeeze(-1)
        return self._unfolded(out, q), weight

    def backward(
        self,
        weight: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        gradient: torch.Tensor,
        scores: Scores,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, and of fetched blocks and sinks, to be summed over ranks."""
        width = q.shape[-1]
        folded, folded_gradient = self._folded(q, kv), self._folded(gradient, kv)
        inner = (folded_gradient * self._folded(out, kv)).sum(-1, keepdim=True)
        dq = torch.zeros_like(folded)
        dkv = kv.new_zeros(kv.shape, dtype=folded.dtype)
        sink = self._folded_sinks(sinks, folded)
        dsinks = [] if sink is None else [torch.zeros_like(sink)]
        for row in self._rows:
            k, v = self._keys(kv, row, width)
            own, do = folded[row.slot], folded_gradient[row.slot]
            own_weight = weight[row.slot].unsqueeze(-1)
            seen, steepness = self._scores(own, k, row, scores)
            shares = (seen - own_weight).exp()
            slope = shares * (do @ v.transpose(-1, -2) - inner[row.slot]) * steepness
            if sink is not None:
                dsinks[0] -= ((sink - own_weight).exp() * inner[row.slot]).sum(0)
            dq[row.slot] = slope @ k
            both = torch.cat([slope.transpose(-1, -2) @ own, shares.transpose(-1, -2) @ do], -1)
            dkv[row.columns] += both.unflatten(2, (len(row.columns), self._block)).permute(2, 0, 1, 3, 4)
        return self._unfolded(dq, q), dkv, *(each.view(-1, self._block).sum(-1) for each in dsinks)

    def _folded_sinks(self, sinks: torch.Tensor | None, folded: torch.Tensor) -> torch.Tensor | None:
        """Returns (heads, queries of all heads that share keys, 1)."""
        if sinks is None:
            return None
        return sinks.to(folded.dtype).repeat_interleave(self._block).view(folded.shape[2], -1, 1)

    def _folded(self, values: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Returns (blocks, batch, heads, queries of all heads that share keys, width), in at least 32 bits."""
        exact = torch.promote_types(values.dtype, torch.float32)
        cut = values.to(exact).unflatten(2, (-1, self._block)).unflatten(1, (kv.shape[2], -1))
        folded: torch.Tensor = cut.permute(3, 0, 1, 2, 4, 5).flatten(3, 4)
        return folded

    def _unfolded(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        cut = values.unflatten(3, (-1, self._block)).permute(1, 2, 3, 0, 4, 5)
        unfolded: torch.Tensor = cut.flatten(3, 4).flatten(1, 2).to(like.dtype)
        return unfolded

    def _keys(self, kv: torch.Tensor, row: _Row, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        exact = torch.promote_types(kv.dtype, torch.float32)
        seen = kv.index_select(0, row.columns).to(exact).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return seen[..., :width], seen[..., width:]

    def _scores(
        self, own: torch.Tensor, k: torch.Tensor, row: _Row, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Returns scores, and their derivatives by the products of queries and keys."""
        steepness: torch.Tensor | float = scores.scale
        seen = (own @ k.transpose(-1, -2)) * scores.scale
        if scores.softcap is not None:
            bent = torch.tanh(seen / scores.softcap)
            seen, steepness = scores.softcap * bent, scores.scale * (1 - bent.square())
        tiles = seen.unflatten(2, (-1, self._block)).unflatten(4, (-1, self._block))
        for place, hidden in row.hidden:
            tiles[..., place, :].masked_fill_(hidden, -torch.inf)
        return seen, steepness


def _hidden(plan: ContextPlan, row: int, column: int) -> npt.NDArray[np.bool_]:
    block, most = plan.blocks.block, plan.mask.num_tokens
    queries, keys = row * block + np.arange(block)[:, None], column * block + np.arange(block)[None, :]
    seen = plan.mask.sees(np.minimum(queries, most - 1), np.minimum(keys, most - 1), plan.blocks.window)
    return ~(seen & (queries < most) & (keys < most))


class FlexKernel:
    """Attention of a rank's queries over fetched blocks.

    The backward pass fetches keys and values of a group of heads again: the graph of the forward pass keeps none.
    """

    def __init__(
        self,
        plan: ContextPlan,
        rank: int,
        column_of: npt.NDArray[np.int32],
        num_columns: int,
        device: torch.device,
        attention: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self._mask = block_mask(plan, rank, column_of, num_columns, device)
        self._attention = attention or _compiled()

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, scores: Scores, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Returns the output and its graph."""
        cap = {} if scores.softcap is None else {"score_mod": _capped(scores.softcap)}
        attention = functools.partial(
            self._attention, block_mask=self._mask, scale=scores.scale, enable_gqa=True, **cap
        )
        tape = _Tape(attention if sinks is None else functools.partial(_beside_sinks, attention))
        return tape.run(q, *_halves(kv, q.shape[-1]), *([] if sinks is None else [sinks])), tape

    def backward(
        self,
        saved: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        gradient: torch.Tensor,
        scores: Scores,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, of fetched blocks in 32 bits for the sum over ranks, and of sinks."""
        dq, dk, dv, *dsinks = saved.gradients(*_halves(kv, q.shape[-1]), gradient)
        both = torch.cat([dk, dv], -1).to(torch.promote_types(kv.dtype, torch.float32))
        return dq, both.unflatten(2, (kv.shape[0], -1)).permute(2, 0, 1, 3, 4).contiguous(), *dsinks


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _beside_sinks(
    attention: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Computes attention, of whose softmax each head's sink takes a share."""
    out, weight = attention(q, k, v, return_lse=True)
    scaled: torch.Tensor = out * torch.sigmoid(weight - sinks[:, None].to(weight.dtype)).unsqueeze(-1).to(out.dtype)
    return scaled


class _Tape:
    """An autograd graph without its keys and values, which the backward pass provides again."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        self._attention = attention
        self._leaves: tuple[torch.Tensor, ...] = ()
        self._out: torch.Tensor | None = None
        self._refetched: tuple[torch.Tensor, ...] = ()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Computes the output; the tape owns ``k`` and ``v`` and empties them."""
        self._leaves = tuple(each.detach().requires_grad_() for each in (q, k, v, *more))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            self._out = self._attention(*self._leaves)
        for each in self._leaves[1:3]:
            each.untyped_storage().resize_(0)
        return self._out.detach()

    def gradients(self, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, keys and values."""
        assert self._out is not None
        self._refetched = (k, v)
        try:
            return torch.autograd.grad(self._out, self._leaves, gradient)
        finally:
            self._refetched = ()

    def _pack(self, tensor: torch.Tensor) -> Any:
        for index, leaf in enumerate(self._leaves[1:3]):
            if tensor.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr():
                return index, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        index, shape, stride, offset = packed
        refetched: torch.Tensor = self._refetched[index].as_strided(shape, stride, offset)
        return refetched


def _halves(kv: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns copies of keys and values, each (batch, heads, tokens, width)."""
    blocks, batch, heads, block, both = kv.shape
    halves = kv.new_empty(batch, heads, blocks * block, width), kv.new_empty(batch, heads, blocks * block, both - width)
    for half, part in zip(halves, (kv[..., :width], kv[..., width:]), strict=True):
        half.unflatten(2, (blocks, block)).copy_(part.permute(1, 2, 0, 3, 4))
    return halves


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention)
    return compiled


Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Visibility by batch, head, place of the query and place of the key."""


def block_mask(
    plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
) -> BlockMask:
    """Returns the mask of a rank's queries over fetched keys, equal to the result of ``create_block_mask``.

    Lists are as wide as all columns, though few are used: compiled kernels on CPU need it, and another width for
    another mask would compile again. Columns stand in the order of the sequence.
    """
    tiles, slots, block = plan.tiles(rank), plan.distribution.slots, plan.blocks.block
    placed = tiles.in_columns(column_of)
    turned = placed.turned(num_columns)
    part, full = (_lists(placed, is_full, (slots, num_columns), device) for is_full in (0, 1))
    part_turned, full_turned = (_lists(turned, is_full, (num_columns, slots), device) for is_full in (0, 1))
    keys = np.full((num_columns, block), -1, np.int64)
    fetched = np.flatnonzero(column_of >= 0)
    keys[column_of[fetched]] = fetched[:, None] * block + np.arange(block)
    return BlockMask(
        (slots * block, num_columns * block),
        *part,
        *full,
        *part_turned,
        *full_turned,
        BLOCK_SIZE=(block, block),
        mask_mod=_rule(plan, plan.order_of(rank), keys.ravel(), device),
    )


def _lists(
    tiles: Tiles, is_full: int, shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tiles of one kind in FlexAttention's form: the number and indices of each row's columns."""
    rows = np.repeat(np.arange(tiles.num_rows), np.diff(tiles.offsets))
    selected = tiles.is_full == is_full
    rows, columns = rows[selected], tiles.columns[selected]
    counts = np.bincount(rows, minlength=shape[0]).astype(np.int32)
    starts = np.cumsum(counts) - counts
    filled = np.zeros(shape, np.int32)
    filled[rows, np.arange(len(rows)) - starts[rows]] = columns
    return tuple(torch.from_numpy(each).to(device)[None, None] for each in (counts, filled))  # type: ignore[return-value]


def _rule(plan: ContextPlan, queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], device: torch.device) -> Rule:
    """Returns the rule of mask words; positions of queries and keys are -1 for empty places."""

    def of(positions: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        there = (positions >= 0) & (positions < plan.mask.num_tokens)
        place = np.where(there, positions, 0)
        documents = np.where(there, plan.mask.documents[place], np.int32(PADDING))
        return tuple(torch.from_numpy(each).to(device) for each in (plan.mask.words[place], documents, positions))  # type: ignore[return-value]

    q_word, q_document, q_position = of(queries)
    k_word, k_document, k_position = of(keys)
    q_stream, k_stream = (word >> STREAM_SHIFT & 63 for word in (q_word, k_word))
    q_both, window = q_word & BOTH != 0, plan.blocks.window

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same = (q_document[q] == k_document[k]) & (q_document[q] >= 0)  # or padding would see padding
        attends = (q_word[q] >> k_stream[k]) & 1 != 0
        ahead = q_both[q] & (q_stream[q] == k_stream[k])
        behind = k_position[k] <= q_position[q]
        if window is not None:
            behind = behind & (k_position[k] > q_position[q] - window)
        return same & attends & (behind | ahead)

    return sees


FLEX_BLOCK = 128
"""Tile of compiled FlexAttention, in tokens of queries and of keys."""


def make_kernel(plan: ContextPlan, rank: int, exchange: Alone, device: torch.device) -> BlockRows | FlexKernel:
    """Returns compiled FlexAttention on CUDA, block rows elsewhere.

    Raises:
        ValueError: Blocks are not a multiple of FlexAttention's tile.
    """
    if device.type != "cuda":
        return BlockRows(plan, rank, exchange.column_of, exchange.num_blocks, device)
    if plan.blocks.block % FLEX_BLOCK:
        raise ValueError(
            f"block={plan.blocks.block} is not a multiple of the {FLEX_BLOCK} tokens that compiled FlexAttention works "
            f"on; plan with block={FLEX_BLOCK}, or {2 * FLEX_BLOCK} for FlashAttention on Blackwell"
        )
    return FlexKernel(plan, rank, exchange.column_of, exchange.num_blocks, device)
