"""Attention mask of a text with placeholders, from ids alone, as words of ``mosaic.context``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mosaic.context.words import EVERY_STREAM, MaskWords, token_words

Ints = npt.NDArray[np.int64]


def mask_words(
    ids: Ints,
    tokens: Mapping[str, int],
    kind: str,
    *,
    documents: Ints | None = None,
    lengths: Mapping[str, Sequence[int]] | None = None,
) -> MaskWords:
    """Makes the mask of one sequence.

    Args:
        ids: (tokens,).
        tokens: Placeholder of each tower.
        kind: One of ``KINDS``.
        documents: (tokens,), -1 for padding; None: one document.
        lengths: Placeholders of each item in order, by tower; by default adjacent placeholders are one item.

    Raises:
        ValueError: The kind is unknown, lengths or documents do not fit the text, or a document has over 55 items.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not a kind of mask; use one of {', '.join(KINDS)}")
    owners = np.zeros(len(ids), np.int64) if documents is None else documents
    if len(owners) != len(ids):
        raise ValueError(f"documents are of {len(owners)} tokens and input_ids of {len(ids)}; give one for each token")
    items = {name: item_numbers(name, ids == token, (lengths or {}).get(name)) for name, token in tokens.items()}
    return MaskWords(words=KINDS[kind](items, owners), documents=owners.astype(np.int32))


def item_numbers(name: str, places: npt.NDArray[np.bool_], lengths: Sequence[int] | None) -> Ints:
    """Returns the item number of each placeholder token, from 0; -1 for other tokens.

    Raises:
        ValueError: The number of placeholders differs from the sum of ``lengths``.
    """
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
    streams = np.zeros(len(documents), np.int64)
    edges = np.flatnonzero(np.diff(documents)) + 1
    for own in np.split(np.arange(len(documents)), edges):
        item_tokens = own[key[own] >= 0]
        streams[item_tokens] = np.unique(key[item_tokens], return_inverse=True)[1] + 1
    return token_words(streams, both=key >= 0)


def _cornstarch(items: Mapping[str, Ints], documents: Ints) -> Ints:
    streams = np.zeros(len(documents), np.int64)
    for place, numbers in enumerate(items.values(), start=1):
        streams[numbers >= 0] = place
    attends = np.where(streams == 0, np.int64(EVERY_STREAM), np.int64(1) << streams)
    return token_words(streams, attends, streams > 0)


KINDS = {"causal": _causal, "gemma": _gemma, "cornstarch": _cornstarch}
"""By name: ``causal`` as in LLaVA and Qwen-VL; ``gemma`` causal, and an item sees all of itself; ``cornstarch``
text causal, and a modality sees all of itself and nothing else (section 4.3.1)."""
