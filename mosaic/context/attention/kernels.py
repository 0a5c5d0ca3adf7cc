"""Kernels of local attention: plain torch by blocks of queries, and compiled FlexAttention on CUDA."""

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
from mosaic.context.words import BOTH, PADDING, STREAM_SHIFT

FLEX_BLOCK = 128
"""Tile of compiled FlexAttention, in tokens of queries and of keys."""

Rule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""Visibility by batch, head, query place and key place."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one call: scaled, optionally capped products of queries and keys, and sinks."""

    scale: float
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """Shape (query heads,): a score per head without a value (GPT-OSS)."""

    def of(self, heads: slice, sinks: torch.Tensor | None) -> Scores:
        """Returns the scores of some heads, with their sinks."""
        return Scores(self.scale, self.softcap, None if sinks is None else sinks[heads])


@dataclass(frozen=True, slots=True)
class _Row:
    """One block of queries with visible keys."""

    queries: slice
    columns: torch.Tensor
    """Places of its visible key blocks, in sequence order."""
    partial: torch.Tensor
    """Places of keys in partially visible tiles, within these blocks."""
    hidden: torch.Tensor
    """Hidden pairs of queries and ``partial``."""

    def mask(self) -> torch.Tensor:
        """Returns the hidden pairs of queries and all keys in ``columns``."""
        block = len(self.hidden)
        hidden = self.hidden.new_zeros(block, len(self.columns) * block)
        hidden[:, self.partial] = self.hidden
        return hidden


class BlockRows:
    """Exact attention by blocks of queries, with a backward pass, which FlexAttention lacks on CPU cores.

    Each query block reads its key blocks in sequence order, so its output and its queries' gradient have the same bits
    on any number of ranks. The backward pass recomputes each block.
    """

    def __init__(
        self, plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
    ) -> None:
        self._rows, block = [], plan.blocks.block
        tiles, sees = plan.tiles(rank), make_rule(plan, rank, column_of, num_columns, device)
        places = torch.arange(block, device=device)
        for slot in range(tiles.num_rows):
            own = slice(tiles.offsets[slot], tiles.offsets[slot + 1])
            columns = torch.from_numpy(column_of[tiles.columns[own]].astype(np.int64)).to(device)
            if not len(columns):
                continue
            is_partial = torch.from_numpy(tiles.is_full[own] == 0).to(device)
            keys = (columns[is_partial][:, None] * block + places).flatten()
            hidden = ~sees(None, None, slot * block + places[:, None], keys[None])
            partial = (is_partial.nonzero() * block + places).flatten()
            self._rows.append(_Row(slice(slot * block, (slot + 1) * block), columns, partial, hidden))

    def forward(self, q: torch.Tensor, kv: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, None]:
        """Returns the output of some heads; saves nothing for backward.

        ``q`` is (batch, query heads, local tokens, width), ``kv`` (blocks, batch, heads, block, width + value width).
        """
        out = q.new_zeros(*q.shape[:-1], kv.shape[-1] - q.shape[-1])
        for row in self._rows:
            out[:, :, row.queries] = _attended(*_inputs(row, q, kv, scores), scores=scores, hidden=row.mask())
        return out, None

    def backward(
        self, saved: None, q: torch.Tensor, kv: torch.Tensor, gradient: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, and those of fetched blocks and sinks to be summed over ranks."""
        wide = torch.promote_types(kv.dtype, torch.float32)
        dq, dkv = torch.zeros_like(q), torch.zeros_like(kv, dtype=wide)
        dsinks = [] if scores.sinks is None else [torch.zeros_like(scores.sinks, dtype=wide)]
        for row in self._rows:
            inputs = [each.detach().requires_grad_() for each in _inputs(row, q, kv, scores)]
            with torch.enable_grad():
                out = _attended(*inputs, scores=scores, hidden=row.mask())
            own_dq, own_dkv, *own_dsinks = torch.autograd.grad(out, inputs, gradient[:, :, row.queries].to(wide))
            dq[:, :, row.queries] = own_dq
            dkv[row.columns] += own_dkv
            for total, own in zip(dsinks, own_dsinks, strict=True):
                total += own
        return dq, dkv, *dsinks


def _inputs(row: _Row, q: torch.Tensor, kv: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, ...]:
    """Returns a row's queries, key and value blocks, and sinks, in at least 32 bits."""
    wide = torch.promote_types(kv.dtype, torch.float32)
    inputs = (q[:, :, row.queries].contiguous(), kv.index_select(0, row.columns), scores.sinks)
    return tuple(each.to(wide) for each in inputs if each is not None)


def _attended(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor | None = None, *, scores: Scores, hidden: torch.Tensor
) -> torch.Tensor:
    """Computes attention of one query block to key blocks, except for hidden pairs."""
    k, v = kv.permute(1, 2, 0, 3, 4).flatten(2, 3).tensor_split([q.shape[-1]], -1)
    grouped = q.unflatten(1, (k.shape[1], -1))  # (batch, key heads, query heads of each, block, width)
    logits = torch.einsum("bgsqw,bgkw->bgsqk", grouped, k) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits.masked_fill_(hidden, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(k.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    out = torch.einsum("bgsqk,bgkw->bgsqw", logits.softmax(-1)[..., : k.shape[2]], v)
    return out.masked_fill(hidden.all(-1, keepdim=True), 0).flatten(1, 2)


class FlexKernel:
    """Compiled FlexAttention without saved keys and values; the backward pass fetches them again."""

    def __init__(
        self, plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
    ) -> None:
        self._mask = block_mask(plan, rank, column_of, num_columns, device)

    def forward(self, q: torch.Tensor, kv: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, _Tape]:
        """Returns the output and its graph; arguments are those of ``BlockRows``."""
        cap = {} if scores.softcap is None else {"score_mod": _capped(scores.softcap)}
        attention = functools.partial(
            compiled_attention(), block_mask=self._mask, scale=scores.scale, enable_gqa=True, **cap
        )
        tape = _Tape(attention if scores.sinks is None else functools.partial(_beside_sinks, attention))
        return tape.run(q, *_halves(kv, q.shape[-1]), *([] if scores.sinks is None else [scores.sinks])), tape

    def backward(
        self, saved: _Tape, q: torch.Tensor, kv: torch.Tensor, gradient: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, of fetched blocks in 32 bits for the sum over ranks, and of sinks."""
        dq, dk, dv, *dsinks = saved.gradients(_halves(kv, q.shape[-1]), gradient)
        both = torch.cat([dk, dv], -1).to(torch.promote_types(kv.dtype, torch.float32))
        return dq, both.unflatten(2, (kv.shape[0], -1)).permute(2, 0, 1, 3, 4).contiguous(), *dsinks


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    return lambda score, *_: softcap * torch.tanh(score / softcap)


def _beside_sinks(
    attention: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Computes attention with a sink in each head's softmax."""
    out, weight = attention(q, k, v, return_lse=True)
    scaled: torch.Tensor = out * torch.sigmoid(weight - sinks[:, None].to(weight.dtype)).unsqueeze(-1).to(out.dtype)
    return scaled


class _Tape:
    """An autograd graph without keys and values, which the backward pass provides again."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        self._attention = attention

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Computes the output; the tape owns ``k`` and ``v`` and empties them."""
        self._leaves = tuple(each.detach().requires_grad_() for each in (q, k, v, *more))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            self._out = self._attention(*self._leaves)
        for each in self._leaves[1:3]:
            each.untyped_storage().resize_(0)
        return self._out.detach()

    def gradients(self, kv: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, keys, values and further inputs."""
        self._refetched = kv
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


def _halves(kv: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Returns copies of keys and values, each (batch, heads, tokens, width)."""
    parts = kv.permute(1, 2, 0, 3, 4).tensor_split([width], -1)
    return tuple(part.clone(memory_format=torch.contiguous_format).flatten(2, 3) for part in parts)


@functools.cache
def compiled_attention() -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention)
    return compiled


def block_mask(
    plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
) -> BlockMask:
    """Returns the mask of a rank's queries over fetched keys, equal to the result of ``create_block_mask``.

    Lists have the width of all columns: compiled kernels on CPU need it, and other widths would compile again. Columns
    are in sequence order.
    """
    tiles, slots, block = plan.tiles(rank), plan.distribution.slots, plan.blocks.block
    rows, columns = np.repeat(np.arange(tiles.num_rows), np.diff(tiles.offsets)), column_of[tiles.columns]
    lists = []
    for is_full in (0, 1):
        selected = tiles.is_full == is_full
        counts = np.bincount(rows[selected], minlength=slots).astype(np.int32)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        filled = np.zeros((slots, num_columns), np.int32)
        filled[rows[selected], places] = columns[selected]
        lists += [torch.from_numpy(each).to(device)[None, None] for each in (counts, filled)]
    part_counts, part, full_counts, full = lists
    rule, lengths = make_rule(plan, rank, column_of, num_columns, device), (slots * block, num_columns * block)
    return BlockMask.from_kv_blocks(part_counts, part, full_counts, full, block, rule, lengths)


def make_rule(
    plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
) -> Rule:
    """Returns the mask function of mask words for a rank's queries and fetched keys, by their places."""
    mask, block, window = plan.mask, plan.blocks.block, plan.blocks.window
    keys = np.full((num_columns, block), -1, np.int64)  # -1 for empty places
    fetched = np.flatnonzero(column_of >= 0)
    keys[column_of[fetched]] = fetched[:, None] * block + np.arange(block)
    keys[keys >= mask.num_tokens] = -1
    words, documents = np.append(mask.words, 0), np.append(mask.documents, np.int32(PADDING))  # the last at -1
    q_word, q_document, q_position, k_word, k_document, k_position = (
        torch.from_numpy(values).to(device)
        for positions in (plan.order_of(rank), keys.ravel())
        for values in (words[positions], documents[positions], positions)
    )
    q_stream, k_stream = (word >> STREAM_SHIFT & 63 for word in (q_word, k_word))
    q_both = q_word & BOTH != 0

    def sees(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same_document = (q_document[q] == k_document[k]) & (q_document[q] >= 0)  # otherwise padding would see padding
        attends = (q_word[q] >> k_stream[k]) & 1 != 0
        ahead = q_both[q] & (q_stream[q] == k_stream[k])
        behind = k_position[k] <= q_position[q]
        if window is not None:
            behind = behind & (k_position[k] > q_position[q] - window)
        return same_document & attends & (behind | ahead)

    return sees


def make_kernel(plan: ContextPlan, rank: int, exchange: Alone, device: torch.device) -> BlockRows | FlexKernel:
    """Returns compiled FlexAttention on CUDA, block rows elsewhere."""
    if device.type == "cuda" and plan.blocks.block % FLEX_BLOCK:
        raise ValueError(
            f"block={plan.blocks.block} is not a multiple of {FLEX_BLOCK}, the tile of compiled FlexAttention; "
            f"plan with block={FLEX_BLOCK}, or {2 * FLEX_BLOCK} for FlashAttention on Blackwell"
        )
    kernel = FlexKernel if device.type == "cuda" else BlockRows
    return kernel(plan, rank, exchange.column_of, exchange.num_blocks, device)
