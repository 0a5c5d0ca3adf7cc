"""Merges features into a text with placeholders, and makes its attention mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mosaic.context.words import EVERY_STREAM, MaskWords, gemma, token_words
from mosaic.errors import unknown
from mosaic.glue.tower import Features

Ints = npt.NDArray[np.int64]


def without_placeholders(
    input_ids: Tensor, tokens: Mapping[str, int], vocabulary: int
) -> tuple[Tensor, dict[str, list[int]]]:
    """Returns ids with 0 for placeholders, and the number of placeholders per row by tower.

    Synchronizes with the device once.
    """
    places = [input_ids == token for token in tokens.values()]
    ids = input_ids
    for place in places:
        ids = ids.masked_fill(place, 0)
    is_outside = (ids < 0) | (ids >= vocabulary)
    num_outside, *counts = torch.stack([place.sum(-1) for place in (is_outside, *places)]).tolist()
    if any(num_outside):
        placeholders = ", ".join(f"{name} {token}" for name, token in tokens.items()) or "none"
        raise ValueError(
            f"{sum(num_outside)} of the input_ids are outside the vocabulary of {vocabulary} ids, such as "
            f"{int(ids[is_outside][0])}, and are not tokens of towers ({placeholders}); use the language model's "
            "tokenizer, resize its embeddings, or pass Tower(token=...)"
        )
    return ids, dict(zip(tokens, counts, strict=True))


def flat_features(name: str, features: Features, width: int, counts: Sequence[int]) -> Tensor:
    """Checks that features match the placeholders, with each item in one row; returns (features, width)."""
    is_by_item = not isinstance(features, Tensor) or features.ndim == 3
    lengths = [len(item) for item in features] if is_by_item else [1] * len(features)
    flat = torch.cat(tuple(features)) if is_by_item else features
    assert isinstance(flat, Tensor)
    if flat.ndim != 2 or flat.shape[1] != width:
        raise ValueError(
            f"{name!r} returns features of shape {tuple(flat.shape)}, but the language model has (features, {width}); "
            "fix its projector"
        )
    by_row = f"by row {', '.join(map(str, counts[:8]))}{', ...' if len(counts) > 8 else ''}"
    if sum(counts) != len(flat):
        raise ValueError(
            f"input_ids have {sum(counts)} placeholders of {name!r} ({by_row}), its inputs have {len(flat)} features; "
            "use one placeholder per feature, and check that the text was not truncated"
        )
    if not set(accumulate(counts)) <= {0, *accumulate(lengths)}:
        raise ValueError(
            f"items of {name!r} have {', '.join(map(str, lengths[:8]))} features, unlike the placeholders in rows "
            f"({by_row}); put an item's placeholders into one row"
        )
    return flat


def mask_words(ids: Ints, tokens: Mapping[str, int], kind: str, documents: Ints | None) -> MaskWords:
    """Makes the attention mask of one sequence from its ids, (tokens,); see ``MultimodalModel.mask``."""
    if kind not in MASK_KINDS:
        raise ValueError(unknown("kind of mask", kind, MASK_KINDS))
    owners = np.zeros(len(ids), np.int64) if documents is None else documents
    if len(owners) != len(ids):
        raise ValueError(f"documents have {len(owners)} tokens, but input_ids {len(ids)}; pass one for each token")
    items = {}
    for name, token in tokens.items():
        places = ids == token
        begins = places & ~np.r_[False, places[:-1]]
        items[name] = np.where(places, np.cumsum(begins) - 1, -1)  # the item of each placeholder, -1 for other tokens
    return MaskWords(words=MASK_KINDS[kind](items, owners), documents=owners.astype(np.int32))


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
"""By name: ``causal`` as in LLaVA and Qwen-VL; ``gemma``: causal, and an item sees all of itself; ``cornstarch``: text
is causal, and a modality sees only itself (section 4.3.1)."""
