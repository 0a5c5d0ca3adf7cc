"""Replacement of placeholders in a text by features: count, check, and fill in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mosaic.glue.tower import Features

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

        Args:
            input_ids: (batch, tokens).
            tokens: Placeholder of each tower.
            vocabulary: Number of ids of the language model; placeholders may lie beyond.
            labels: (batch, tokens) to predict, if any.

        Raises:
            ValueError: An id, or a placeholder in the labels, is outside the vocabulary.
        """
        places = {name: input_ids == token for name, token in tokens.items()}
        ids = input_ids
        for place in places.values():
            ids = ids.masked_fill(place, 0)
        beyond = (ids < 0) | (ids >= vocabulary)
        sums = [place.sum(-1) for place in (beyond, *places.values())]
        unpredictable = [
            name
            for name, token in tokens.items()
            if labels is not None and token != IGNORED and not 0 <= token < vocabulary
        ]
        sums += (cast(Tensor, labels == tokens[name]).sum(-1).to(input_ids.device) for name in unpredictable)
        unknown_ids, *num_placeholders = torch.stack(sums).tolist()
        if sum(unknown_ids):
            known = ", ".join(f"{name} {token}" for name, token in tokens.items()) or "none"
            raise ValueError(
                f"{sum(unknown_ids)} of the input_ids are not among the {vocabulary} ids of the vocabulary, such as "
                f"{int(ids[beyond][0])}, and are no tower's token ({known}); use the language model's tokenizer, "
                "resize its embeddings, or pass Tower(token=...)"
            )
        for name, rows in zip(unpredictable, num_placeholders[len(places) :], strict=True):
            if sum(rows):
                raise ValueError(
                    f"labels hold {sum(rows)} placeholders of {name!r} (id {tokens[name]}), which is beyond the "
                    f"vocabulary; set labels to {IGNORED} there"
                )
        return cls(
            ids=ids,
            places=places,
            counts=dict(zip(places, num_placeholders, strict=False)),
        )


def put(embedded: Tensor, features: Mapping[str, Features], placeholders: Placeholders) -> Tensor:
    """Puts features in the place of their placeholders, in order.

    Args:
        embedded: (batch, tokens, width).
        features: By tower; a missing tower has no placeholders.
        placeholders: Positions in the batch.

    Raises:
        ValueError: The numbers of placeholders and features differ, an item lies in two rows, or widths differ.
    """
    for name, counts in placeholders.counts.items():
        if name not in features and any(counts):
            raise ValueError(
                f"input_ids hold {sum(counts)} placeholders of {name!r} and the batch has no {name} inputs; give "
                f"{name}={{...}}, or leave them out of the text"
            )
    for name, tower_features in features.items():
        flat, lengths = _flattened(name, tower_features, embedded.shape[-1])
        _check_counts(name, placeholders.counts[name], len(flat), lengths)
        if len(flat):
            embedded = _filled(embedded, placeholders.places[name], flat.to(embedded.device, embedded.dtype))
    return embedded


def _filled(embedded: Tensor, where: Tensor, flat: Tensor) -> Tensor:
    """Returns (batch, tokens, width) with features in place of placeholders.

    ``masked_scatter`` does the same, but its backward synchronizes with the device.
    """
    order = (where.flatten().cumsum(0) - 1).clamp(min=0)
    return torch.where(where.unsqueeze(-1), flat.index_select(0, order).view_as(embedded), embedded)


def _flattened(name: str, features: Features, width: int) -> tuple[Tensor, list[int] | None]:
    """Returns (features, width), and the number of each item's features if known."""
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
            "fix its projector, or the result of after_projector"
        )
    return flat, lengths


def _check_counts(name: str, counts: Sequence[int], num_features: int, lengths: list[int] | None) -> None:
    if sum(counts) != num_features:
        raise ValueError(
            f"input_ids hold {sum(counts)} placeholders of {name!r} ({_by_row(counts)}), its inputs give "
            f"{num_features} features; put one placeholder into the text for each, and check that no text was cut off"
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
