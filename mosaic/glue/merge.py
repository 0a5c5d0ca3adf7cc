"""Putting features into a text: placeholders are counted, checked, and filled in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mosaic.glue.tower import Features

IGNORED = -100
"""Label of what is not to be predicted, as torch's cross entropy has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """Where the towers' features go in a batch."""

    ids: Tensor
    """(batch, tokens), with 0 for each placeholder: ids beyond the vocabulary cannot be looked up."""
    places: Mapping[str, Tensor]
    """By tower: (batch, tokens) of bool."""
    counts: Mapping[str, Sequence[int]]
    """By tower: placeholders in each row."""

    @classmethod
    def find(cls, input_ids: Tensor, tokens: Mapping[str, int], vocabulary: int, labels: Tensor | None) -> Placeholders:
        """Counts every tower's placeholders, and ids that are beyond the vocabulary; the device is asked once.

        Args:
            input_ids: (batch, tokens).
            tokens: By tower.
            vocabulary: Number of ids that the language model knows; placeholders may lie beyond.
            labels: What is to be predicted.

        Raises:
            ValueError: An id is beyond the vocabulary, or a token that is beyond it is to be predicted.
        """
        places = {name: input_ids == token for name, token in tokens.items()}
        ids = input_ids
        for place in places.values():
            ids = ids.masked_fill(place, 0)
        beyond = (ids < 0) | (ids >= vocabulary)
        asked = [place.sum(-1) for place in (beyond, *places.values())]
        judged = [
            name
            for name, token in tokens.items()
            if labels is not None and token != IGNORED and not 0 <= token < vocabulary
        ]
        asked += (cast(Tensor, labels == tokens[name]).sum(-1).to(input_ids.device) for name in judged)
        strange, *counted = torch.stack(asked).tolist()
        if sum(strange):
            known = ", ".join(f"{name} {token}" for name, token in tokens.items()) or "none"
            raise ValueError(
                f"{sum(strange)} of the input_ids are not among the {vocabulary} ids of the vocabulary, such as "
                f"{int(ids[beyond][0])}, and are no tower's token ({known}); take the language model's tokenizer, "
                "resize its embeddings, or give Tower(token=...)"
            )
        for name, rows in zip(judged, counted[len(places) :], strict=True):
            if sum(rows):
                raise ValueError(
                    f"labels hold {sum(rows)} placeholders of {name!r} (id {tokens[name]}), which is beyond the "
                    f"vocabulary; set labels to {IGNORED} there"
                )
        return cls(
            ids=ids,
            places=places,
            counts=dict(zip(places, counted, strict=False)),
        )


def put(embedded: Tensor, features: Mapping[str, Features], placeholders: Placeholders) -> Tensor:
    """Puts features in the place of their placeholders, in order.

    Args:
        embedded: (batch, tokens, width).
        features: By tower; a tower that is left out has no placeholders.
        placeholders: Of the batch.

    Raises:
        ValueError: There are more placeholders or fewer than features, an item's lie in two rows, or widths differ.
    """
    for name, counts in placeholders.counts.items():
        if name not in features and any(counts):
            raise ValueError(
                f"input_ids hold {sum(counts)} placeholders of {name!r} and the batch has no {name} inputs; give "
                f"{name}={{...}}, or leave them out of the text"
            )
    for name, found in features.items():
        flat, lengths = _flattened(name, found, embedded.shape[-1])
        _check_counts(name, placeholders.counts[name], len(flat), lengths)
        if len(flat):
            embedded = _filled(embedded, placeholders.places[name], flat.to(embedded.device, embedded.dtype))
    return embedded


def _filled(embedded: Tensor, where: Tensor, flat: Tensor) -> Tensor:
    """Returns (batch, tokens, width) with features where there are placeholders.

    ``masked_scatter`` does the same, but its backward waits for the device to say how many there are.
    """
    order = (where.flatten().cumsum(0) - 1).clamp(min=0)
    return torch.where(where.unsqueeze(-1), flat.index_select(0, order).view_as(embedded), embedded)


def _flattened(name: str, features: Features, width: int) -> tuple[Tensor, list[int] | None]:
    """Returns (features, width), and how many each item has, where items are known."""
    lengths: list[int] | None
    if not isinstance(features, Tensor):
        lengths = [len(item) for item in features]
        flat = torch.cat(list(features))
    elif features.ndim == 3:
        lengths = [features.shape[1]] * len(features)
        flat = features.flatten(0, 1)
    else:
        flat, lengths = features, None
    if flat.ndim != 2 or flat.shape[1] != width:
        raise ValueError(
            f"{name!r} returns features of shape {tuple(flat.shape)}, the language model takes (features, {width}); "
            "mend its projector, or what after_projector returns"
        )
    return flat, lengths


def _check_counts(name: str, counts: Sequence[int], num_features: int, lengths: list[int] | None) -> None:
    if sum(counts) != num_features:
        raise ValueError(
            f"input_ids hold {sum(counts)} placeholders of {name!r} ({_by_row(counts)}), its inputs give "
            f"{num_features} features; put one placeholder into the text for each, and see that no text was cut off"
        )
    if lengths is None:
        return
    row, left = 0, list(counts)
    for item, length in enumerate(lengths):
        while row < len(left) and not left[row]:
            row += 1
        if length and left[row] < length:
            raise ValueError(
                f"item {item} of {name!r} has {length} features and row {row} of input_ids {left[row]} placeholders "
                f"left for it ({_by_row(counts)}); an item's features lie in one row"
            )
        if length:
            left[row] -= length


def _by_row(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:8]))
    return f"by row {shown}{', ...' if len(counts) > 8 else ''}"
