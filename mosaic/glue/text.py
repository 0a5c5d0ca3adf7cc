"""A text with placeholders: features in their places, the tokens' positions, and the attention mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosaic.context.words import EVERY_STREAM, MaskWords, gemma, token_words
from mosaic.glue.tower import Features

Ints = npt.NDArray[np.int64]

IGNORED = -100
"""Label of tokens without a loss, as in torch's cross entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """Positions of the towers' features in a batch."""

    ids: Tensor
    """(batch, tokens), with 0 for each placeholder: ids beyond the vocabulary cannot be looked up."""
    places: Mapping[str, Tensor]
    """(batch, tokens) of bool, by tower."""
    counts: Mapping[str, Sequence[int]]
    """Placeholders in each row, by tower."""

    @classmethod
    def find(cls, input_ids: Tensor, tokens: Mapping[str, int], vocabulary: int, labels: Tensor | None) -> Placeholders:
        """Counts every tower's placeholders, and ids outside the vocabulary, with one synchronization.

        Placeholders (``tokens``) may lie beyond the vocabulary in ``input_ids``, but not in ``labels``.

        Raises:
            ValueError: An id, or a placeholder in the labels, is outside the vocabulary.
        """
        places = {name: input_ids == token for name, token in tokens.items()}
        ids = input_ids
        for place in places.values():
            ids = ids.masked_fill(place, 0)
        outside = (ids < 0) | (ids >= vocabulary)
        beyond = {} if labels is None else {n: t for n, t in tokens.items() if t != IGNORED and not 0 <= t < vocabulary}
        labeled = [cast(Tensor, labels == token).to(ids.device) for token in beyond.values()]
        num_outside, *rows = torch.stack([m.sum(-1) for m in (outside, *places.values(), *labeled)]).tolist()
        if sum(num_outside):
            placeholders = ", ".join(f"{name} {token}" for name, token in tokens.items()) or "none"
            raise ValueError(
                f"{sum(num_outside)} of the input_ids are not among the {vocabulary} ids of the vocabulary, such as "
                f"{int(ids[outside][0])}, and are no tower's token ({placeholders}); use the language model's "
                "tokenizer, resize its embeddings, or pass Tower(token=...)"
            )
        for name, counts in zip(beyond, rows[len(places) :], strict=True):
            if sum(counts):
                raise ValueError(
                    f"labels hold {sum(counts)} placeholders of {name!r} (id {tokens[name]}), which is beyond the "
                    f"vocabulary; set labels to {IGNORED} there"
                )
        return cls(ids=ids, places=places, counts=dict(zip(places, rows, strict=False)))

    def fill(self, embedded: Tensor, features: Mapping[str, Features]) -> Tensor:
        """Returns embeddings (batch, tokens, width) with features in the place of their placeholders, in order.

        Raises:
            ValueError: The numbers of placeholders and features differ, an item lies in two rows, or widths differ.
        """
        for name, counts in self.counts.items():
            if name not in features and any(counts):
                raise ValueError(
                    f"input_ids hold {sum(counts)} placeholders of {name!r} and the batch has no {name} inputs; give "
                    f"{name}={{...}}, or leave them out of the text"
                )
        for name, tower_features in features.items():
            flat = _flattened(name, tower_features, embedded.shape[-1], self.counts[name])
            if len(flat):  # masked_scatter does the same, but its backward synchronizes with the device
                where, flat = self.places[name], flat.to(embedded.device, embedded.dtype)
                order = (where.flatten().cumsum(0) - 1).clamp(min=0)
                embedded = torch.where(where.unsqueeze(-1), flat.index_select(0, order).view_as(embedded), embedded)
        return embedded


def _flattened(name: str, features: Features, width: int, counts: Sequence[int]) -> Tensor:
    """Returns (features, width), as many as there are placeholders in the rows."""
    lengths: list[int] = []
    if not isinstance(features, Tensor):
        lengths, flat = [len(item) for item in features], torch.cat(list(features))
    elif features.ndim == 3:
        lengths, flat = [features.shape[1]] * len(features), features.flatten(0, 1)
    else:
        flat = features
    if flat.ndim != 2 or flat.shape[1] != width:
        raise ValueError(
            f"{name!r} returns features of shape {tuple(flat.shape)}, the language model takes (features, {width}); "
            "fix its projector, or the result of after_projector"
        )
    by_row = f"by row {', '.join(map(str, counts[:8]))}{', ...' if len(counts) > 8 else ''}"
    if sum(counts) != len(flat):
        raise ValueError(
            f"input_ids hold {sum(counts)} placeholders of {name!r} ({by_row}), its inputs give {len(flat)} features; "
            "put one placeholder into the text for each, and check that no text was cut off"
        )
    row, remaining = 0, list(counts)
    for item, length in enumerate(lengths):
        while length and not remaining[row]:
            row += 1
        if length and remaining[row] < length:
            raise ValueError(
                f"item {item} of {name!r} has {length} features and row {row} of input_ids {remaining[row]} "
                f"placeholders left for it ({by_row}); an item's features lie in one row"
            )
        if length:
            remaining[row] -= length
    return flat


def text_positions(
    input_ids: Tensor, documents: Tensor, tokens: Mapping[str, int], items: Mapping[str, Sequence[Tensor]]
) -> Tensor:
    """Returns the positions of tokens, (axes, batch, tokens): from 0 in each document, 0 for padding.

    M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1) gives the tokens of an image their time, row and column. Text has
    one position on all axes; an item begins behind the text before it, and text continues behind the item's greatest
    position. ``items`` has the positions of features in each item of towers with ``positions``, (axes, features); a
    document's tokens are contiguous.

    Raises:
        ValueError: The numbers of features and placeholders differ, or an item is interrupted.
    """
    ids, owners = input_ids.cpu().numpy(), documents.cpu().numpy()
    offsets = {name: [item.cpu().numpy() for item in own] for name, own in items.items()}
    numbers = {
        name: _item_numbers(name, (ids == tokens[name]).ravel(), [item.shape[1] for item in own]).reshape(ids.shape)
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


def mask_words(
    ids: Ints,
    tokens: Mapping[str, int],
    kind: str,
    *,
    documents: Ints | None = None,
    lengths: Mapping[str, Sequence[int]] | None = None,
) -> MaskWords:
    """Makes the attention mask of one sequence from its ids, (tokens,); see ``MultimodalModel.mask``."""
    if kind not in MASK_KINDS:
        raise ValueError(f"kind={kind!r} is not a kind of mask; use one of {', '.join(MASK_KINDS)}")
    owners = np.zeros(len(ids), np.int64) if documents is None else documents
    if len(owners) != len(ids):
        raise ValueError(f"documents are of {len(owners)} tokens and input_ids of {len(ids)}; give one for each token")
    items = {name: _item_numbers(name, ids == token, (lengths or {}).get(name)) for name, token in tokens.items()}
    return MaskWords(words=MASK_KINDS[kind](items, owners), documents=owners.astype(np.int32))


def _item_numbers(name: str, places: npt.NDArray[np.bool_], lengths: Sequence[int] | None) -> Ints:
    """Returns the item number of each placeholder token, from 0; -1 for other tokens."""
    numbers = np.full(len(places), -1, np.int64)
    if lengths is None:
        begins = places & ~np.r_[False, places[:-1]]
        numbers[places] = (np.cumsum(begins) - 1)[places]
        return numbers
    if sum(lengths) != places.sum():
        raise ValueError(
            f"the text has {places.sum()} placeholders of {name!r}, and its {len(lengths)} items have {sum(lengths)} "
            "together; give the lengths of this text's items"
        )
    numbers[places] = np.repeat(np.arange(len(lengths)), lengths)
    return numbers


def _causal(items: Mapping[str, Ints], documents: Ints) -> Ints:
    return np.full(len(documents), token_words(0))


def _gemma(items: Mapping[str, Ints], documents: Ints) -> Ints:
    key = np.full(len(documents), -1, np.int64)
    for place, numbers in enumerate(items.values()):
        key = np.where(numbers >= 0, numbers * len(items) + place, key)
    edges = np.flatnonzero(np.diff(documents)) + 1
    return np.concatenate([gemma(own).words for own in np.split(key, edges)])


def _cornstarch(items: Mapping[str, Ints], documents: Ints) -> Ints:
    streams = np.zeros(len(documents), np.int64)
    for place, numbers in enumerate(items.values(), start=1):
        streams[numbers >= 0] = place
    attends = np.where(streams == 0, np.int64(EVERY_STREAM), np.int64(1) << streams)
    return token_words(streams, attends, streams > 0)


MASK_KINDS = {"causal": _causal, "gemma": _gemma, "cornstarch": _cornstarch}
"""By name: ``causal`` as in LLaVA and Qwen-VL; ``gemma`` causal, and an item sees all of itself; ``cornstarch``
text causal, and a modality sees all of itself and nothing else (section 4.3.1)."""
