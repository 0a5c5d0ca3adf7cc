"""FlexAttention's block mask of one rank, made from tiles without a matrix of blocks or sorting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask

from mosaic.context.plan import ContextPlan
from mosaic.context.tiles import Tiles
from mosaic.context.words import BOTH, PADDING, STREAM_SHIFT

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Visibility by batch, head, place of the query and place of the key."""
Lists = tuple[torch.Tensor, torch.Tensor]
"""Number and indices of each row's columns: shapes (1, 1, rows) and (1, 1, rows, columns)."""


def block_mask(
    plan: ContextPlan, rank: int, column_of: npt.NDArray[np.int32], num_columns: int, device: torch.device
) -> BlockMask:
    """Returns the mask of a rank's queries over fetched keys, equal to the result of ``create_block_mask``.

    Lists are as wide as all columns, though few are used: compiled kernels on CPU need it, and another width for
    another mask would compile again. Columns stand in the order of the sequence.

    Args:
        plan: The mask and the assignment of blocks.
        rank: Rank of the queries.
        column_of: Place of each block among the fetched ones, -1 for others.
        num_columns: Fetched blocks.
        device: Device of the lists.
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
        mask_mod=_rule(plan, plan.layout.order_of(rank), keys.ravel(), device),
    )


def _lists(tiles: Tiles, is_full: int, shape: tuple[int, int], device: torch.device) -> Lists:
    """Returns the tiles of one kind in FlexAttention's form; missing rows are empty."""
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
    q_both = q_word & BOTH != 0

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same = (q_document[q] == k_document[k]) & (q_document[q] >= 0)  # or padding would see padding
        attends = (q_word[q] >> k_stream[k]) & 1 != 0
        ahead = q_both[q] & (q_stream[q] == k_stream[k])
        return same & attends & ((k_position[k] <= q_position[q]) | ahead)

    return sees
