"""Positions of a text's tokens: consecutive in each document, or on several axes for items with a shape.

M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1) gives the tokens of an image their time, row and column. Text has one
position on all axes; an item begins behind the text before it, and text continues behind the item's greatest position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mosaic.glue.masks import Ints, item_numbers


def line_positions(documents: Tensor) -> Tensor:
    """Returns (batch, tokens): positions in documents from 0, without padding, which has 0.

    Args:
        documents: (batch, tokens), -1 for padding; a document's tokens are contiguous.
    """
    is_token = documents >= 0
    place = is_token.cumsum(dim=1)  # from 1
    last = torch.where(is_token, torch.arange(documents.shape[1], device=documents.device), 0).cummax(dim=1).values
    before = documents.gather(1, last)[:, :-1]  # document of the last token before, across padding
    begins = torch.cat([is_token[:, :1], is_token[:, 1:] & (before != documents[:, 1:])], dim=1)
    first = torch.where(begins, place, 0).cummax(dim=1).values
    return torch.where(is_token, place - first, 0)


def axes_positions(
    input_ids: Tensor, documents: Tensor, tokens: Mapping[str, int], items: Mapping[str, Sequence[Tensor]]
) -> Tensor:
    """Returns (axes, batch, tokens).

    Args:
        input_ids: (batch, tokens).
        documents: (batch, tokens), -1 for padding.
        tokens: Placeholder of each tower.
        items: For towers with ``positions``: the positions of features in each item, (axes, features).

    Raises:
        ValueError: The numbers of features and placeholders differ, or an item is interrupted.
    """
    ids, owners = input_ids.cpu().numpy(), documents.cpu().numpy()
    offsets = {name: [item.cpu().numpy() for item in own] for name, own in items.items()}
    numbers = {
        name: item_numbers(name, (ids == tokens[name]).ravel(), [item.shape[1] for item in own]).reshape(ids.shape)
        for name, own in offsets.items()
    }
    axes = {len(item) for own in offsets.values() for item in own} or {1}
    if len(axes) > 1:
        raise ValueError(f"items have positions on {sorted(axes)} axes; give all of them on as many")
    positions = np.zeros((axes.pop(), *ids.shape), np.int64)
    for row in range(len(ids)):
        tokens_of_row = np.flatnonzero(owners[row] >= 0)
        edges = np.flatnonzero(np.diff(owners[row, tokens_of_row])) + 1
        for own in np.split(tokens_of_row, edges):
            if len(own):
                here = {name: number[row, own] for name, number in numbers.items()}
                positions[:, row, own] = _document(positions[:, row, own], here, offsets)
    return torch.from_numpy(positions).to(input_ids.device)


def _document(positions: Ints, numbers: Mapping[str, Ints], offsets: Mapping[str, Sequence[Ints]]) -> Ints:
    """Returns the positions of one document, (axes, tokens)."""
    at, token = 0, 0
    starts = {int(place): name for name, number in numbers.items() for place in np.flatnonzero(number >= 0)}
    for place in sorted(starts):
        if place < token:
            continue
        name = starts[place]
        item = offsets[name][numbers[name][place]]
        if not (numbers[name][place : place + item.shape[1]] == numbers[name][place]).all():
            raise ValueError(
                f"item {numbers[name][place]} of {name!r} has {item.shape[1]} features, and its placeholders are not "
                "beside each other in one document; give position_ids yourself"
            )
        positions[:, token:place] = np.arange(at, at + place - token)
        at += place - token
        positions[:, place : place + item.shape[1]] = at + item
        at, token = at + int(item.max()) + 1, place + item.shape[1]
    positions[:, token:] = np.arange(at, at + positions.shape[1] - token)
    return positions
