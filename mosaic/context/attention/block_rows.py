"""Exact attention in plain torch, one block of queries at a time, with a backward pass on any device.

FlexAttention has no backward pass on CPU cores. Each block of queries reads its blocks of keys in the order of the
sequence, so its output and the gradient of its queries have the same bits on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mosaic.context.plan import ContextPlan


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
    """The local part of attention, row by row."""

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

    def forward(self, q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output of one group of heads, and the logarithms of its sums for the backward pass.

        Args:
            q: Shape (batch, query heads, local tokens, width).
            kv: Fetched blocks of keys and values, shape (blocks, batch, heads, block, width + value width).
            scale: Scale of the scores.
        """
        width = q.shape[-1]
        folded = self._folded(q, kv)
        out = folded.new_zeros(*folded.shape[:-1], kv.shape[-1] - width)
        weight = folded.new_zeros(folded.shape[:-1])  # logarithm of the sum of exponentials
        for row in self._rows:
            k, v = self._keys(kv, row, width)
            scores = self._scores(folded[row.slot], k, row, scale)
            most = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)  # finite if all are hidden
            shares = (scores - most).exp()
            total = shares.sum(-1, keepdim=True)
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
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of queries, and of fetched blocks, to be summed over ranks."""
        width = q.shape[-1]
        folded, folded_gradient = self._folded(q, kv), self._folded(gradient, kv)
        inner = (folded_gradient * self._folded(out, kv)).sum(-1, keepdim=True)
        dq = torch.zeros_like(folded)
        dkv = kv.new_zeros(kv.shape, dtype=folded.dtype)
        for row in self._rows:
            k, v = self._keys(kv, row, width)
            own, do = folded[row.slot], folded_gradient[row.slot]
            shares = (self._scores(own, k, row, scale) - weight[row.slot].unsqueeze(-1)).exp()
            slope = shares * (do @ v.transpose(-1, -2) - inner[row.slot]) * scale
            dq[row.slot] = slope @ k
            both = torch.cat([slope.transpose(-1, -2) @ own, shares.transpose(-1, -2) @ do], -1)
            dkv[row.columns] += both.unflatten(2, (len(row.columns), self._block)).permute(2, 0, 1, 3, 4)
        return self._unfolded(dq, q), dkv

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

    def _scores(self, own: torch.Tensor, k: torch.Tensor, row: _Row, scale: float) -> torch.Tensor:
        scores = (own @ k.transpose(-1, -2)) * scale
        tiles = scores.unflatten(2, (-1, self._block)).unflatten(4, (-1, self._block))
        for place, hidden in row.hidden:
            tiles[..., place, :].masked_fill_(hidden, -torch.inf)
        return scores


def _hidden(plan: ContextPlan, row: int, column: int) -> npt.NDArray[np.bool_]:
    block, most = plan.blocks.block, plan.mask.num_tokens
    queries, keys = row * block + np.arange(block)[:, None], column * block + np.arange(block)[None, :]
    seen = plan.mask.sees(np.minimum(queries, most - 1), np.minimum(keys, most - 1))
    return ~(seen & (queries < most) & (keys < most))
