"""Who sees whom in a text with placeholders, as words of ``mosaic.context``; made of ids alone."""

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
        tokens: Each tower's placeholder.
        kind: One of ``KINDS``.
        documents: (tokens,), -1 for padding; None: all of one document.
        lengths: By tower how many placeholders each item has, in order; where it is left out, placeholders beside each
            other are one item.

    Raises:
        ValueError: There is no such kind, lengths or documents are not those of the text, or a document has over 55
            items.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is no kind of mask; use one of {', '.join(KINDS)}")
    found = np.zeros(len(ids), np.int64) if documents is None else documents
    if len(found) != len(ids):
        raise ValueError(f"documents are of {len(found)} tokens and input_ids of {len(ids)}; give one for each token")
    items = {name: item_numbers(name, ids == token, (lengths or {}).get(name)) for name, token in tokens.items()}
    return MaskWords(words=KINDS[kind](items, found), documents=found.astype(np.int32))


def item_numbers(name: str, places: npt.NDArray[np.bool_], lengths: Sequence[int] | None) -> Ints:
    """Returns for each token the number of the item that it is a placeholder of, from 0; -1 for others.

    Raises:
        ValueError: There are more placeholders or fewer than the items have.
    """
    found = np.full(len(places), -1, np.int64)
    if lengths is None:
        begins = places & ~np.r_[False, places[:-1]]
        found[places] = (np.cumsum(begins) - 1)[places]
        return found
    if sum(lengths) != places.sum():
        raise ValueError(
            f"the text has {places.sum()} placeholders of {name!r}, and its {len(lengths)} items have {sum(lengths)} "
            "together; give the lengths of this text's items"
        )
    found[places] = np.repeat(np.arange(len(lengths)), lengths)
    return found


def _causal(items: Mapping[str, Ints], documents: Ints) -> Ints:
    return np.full(len(documents), token_words(0))


def _gemma(items: Mapping[str, Ints], documents: Ints) -> Ints:
    key = np.full(len(documents), -1, np.int64)
    for place, numbers in enumerate(items.values()):
        key = np.where(numbers >= 0, numbers * len(items) + place, key)
    streams = np.zeros(len(documents), np.int64)
    edges = np.flatnonzero(np.diff(documents)) + 1
    for own in np.split(np.arange(len(documents)), edges):
        seen = own[key[own] >= 0]
        streams[seen] = np.unique(key[seen], return_inverse=True)[1] + 1
    return token_words(streams, both=key >= 0)


def _cornstarch(items: Mapping[str, Ints], documents: Ints) -> Ints:
    streams = np.zeros(len(documents), np.int64)
    for place, numbers in enumerate(items.values(), start=1):
        streams[numbers >= 0] = place
    attends = np.where(streams == 0, np.int64(EVERY_STREAM), np.int64(1) << streams)
    return token_words(streams, attends, streams > 0)


KINDS = {"causal": _causal, "gemma": _gemma, "cornstarch": _cornstarch}
"""By name: ``causal`` as LLaVA and Qwen-VL attend; ``gemma`` causal, and an item sees all of itself; ``cornstarch``
text causal, and a modality sees all of itself and nothing else (section 4.3.1)."""
