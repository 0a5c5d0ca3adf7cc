"""Masks of multimodal sequences as one word and one document number per token.

A word has the streams of its document that a token attends, its own stream, and a flag to see that stream in both
directions::

    bit   63       62      61 .. 56      55 .. 0
          unused   both    own stream    streams that it may see

    sees(q, k) = document[q] == document[k] >= 0  and  q attends stream of k
                 and  (k <= q  or  (both[q]  and  stream of q == stream of k))

Streams are numbered within each document, so every document may have 55 images and its text. Words express causal
masks, packed documents, Gemma's images that see themselves and earlier tokens, and Cornstarch's masks (section 4.3.1).
A sliding window is separate, because it differs between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
Documents = npt.NDArray[np.int32]

MAX_STREAMS = 56
"""Number of streams per document."""
STREAM_SHIFT = 56
"""First bit of a token's own stream."""
BOTH = 1 << 62
"""Flag of a token that sees its own stream in both directions."""
EVERY_STREAM = (1 << MAX_STREAMS) - 1
"""Bits of a token that attends all streams."""
PADDING = -1
"""Document number of padding, which neither sees nor is seen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskWords:
    """The attention mask of one sequence. The arrays are read-only.

    Raises:
        TypeError: Words are not int64, or documents not int32.
        ValueError: Shapes differ or are empty, a word has a stream above 55 or uses bit 63, a token sees a stream in
            both directions that it does not attend, or a document's tokens are not contiguous.
    """

    words: Words
    """Shape (tokens,)."""
    documents: Documents
    """Shape (tokens,): 0 or more, equal for the contiguous tokens of one document; -1 for padding."""

    def __post_init__(self) -> None:
        for name, kind in (("words", np.int64), ("documents", np.int32)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != kind:
                actual = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"{name} are {actual}; use a numpy array of {np.dtype(kind).name}")
            view = np.ascontiguousarray(array).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        if self.words.ndim != 1 or self.words.shape != self.documents.shape or not len(self.words):
            raise ValueError(
                f"words have shape {self.words.shape} and documents {self.documents.shape}; "
                "pass one of each for every token of one sequence"
            )
        _check(self.words, self.documents)

    @property
    def num_tokens(self) -> int:
        return len(self.words)

    def sees(self, query: npt.ArrayLike, key: npt.ArrayLike, window: int | None = None) -> npt.NDArray[np.bool_]:
        """Returns True where a query sees a key; positions from 0 broadcast.

        A window is the last ``window`` tokens up to the query, as in transformers; a stream that sees itself in both
        directions stays whole.
        """
        q, k = np.asarray(query), np.asarray(key)
        stream = self.words >> STREAM_SHIFT & 63
        own = (self.words & BOTH != 0)[q] & (stream[q] == stream[k])
        attends = (self.words[q] >> stream[k] & 1).astype(bool)
        same_document = (self.documents[q] == self.documents[k]) & (self.documents[q] >= 0)
        behind = (k <= q) if window is None else (k <= q) & (k > q - window)
        visible: npt.NDArray[np.bool_] = same_document & attends & (behind | own)
        return visible

    def dense(self, window: int | None = None) -> npt.NDArray[np.bool_]:
        """Returns the matrix of all pairs, for small examples; shape (tokens, tokens), queries first."""
        every = np.arange(self.num_tokens)
        return self.sees(every[:, None], every[None, :], window)

    def first_ahead(self) -> npt.NDArray[np.int64]:
        """Returns the first token that each sees outside any window (``num_tokens``: none); shape (tokens,)."""
        streams = self.documents.astype(np.int64) << 6 | self.words >> STREAM_SHIFT & 63
        _, first, stream = np.unique(streams, return_index=True, return_inverse=True)
        return np.where((self.words & BOTH != 0) & (self.documents >= 0), first[stream], self.num_tokens)

    def positions(self) -> npt.NDArray[np.int64]:
        """Returns each token's position in its document from 0, without padding; shape (tokens,)."""
        is_token = self.documents >= 0
        places = np.cumsum(is_token) - 1
        first = np.flatnonzero(is_token)
        first = first[np.r_[True, np.diff(self.documents[first]) != 0]] if len(first) else first
        begins = np.zeros(self.num_tokens, np.int64)
        begins[first] = np.diff(places[first], prepend=0)
        return np.where(is_token, places - np.cumsum(begins), 0)


def token_words(stream: npt.ArrayLike, attends: npt.ArrayLike = EVERY_STREAM, both: npt.ArrayLike = False) -> Words:
    """Makes words from own streams, bits of attended streams, and flags; shapes broadcast."""
    streams = np.asarray(stream, np.int64)
    if streams.size and (streams.min() < 0 or streams.max() >= MAX_STREAMS):
        raise ValueError(
            f"a document has stream {streams.max() if streams.min() >= 0 else streams.min()}; "
            f"use 0 to {MAX_STREAMS - 1}: pack fewer images into one document, or share streams"
        )
    flags = np.where(np.asarray(both, bool), np.int64(BOTH), np.int64(0))
    words: Words = flags | streams << STREAM_SHIFT | (np.asarray(attends, np.int64) & EVERY_STREAM)
    return words


def causal(num_tokens: int) -> MaskWords:
    """Makes the causal mask of one document."""
    return MaskWords(words=np.full(num_tokens, token_words(0)), documents=np.zeros(num_tokens, np.int32))


def gemma(images: npt.ArrayLike) -> MaskWords:
    """Makes Gemma 3's mask of one document: causal, and images see all of themselves.

    Args:
        images: Shape (tokens,): -1 for text, otherwise the number of the token's image, like transformers'
            ``block_sequence_ids``. At most 55 images.
    """
    numbers = np.asarray(images)
    if numbers.ndim != 1:
        raise ValueError(f"images have shape {numbers.shape}; pass one number for each token of one document")
    is_image = numbers >= 0
    streams = np.zeros(len(numbers), np.int64)
    streams[is_image] = np.unique(numbers[is_image], return_inverse=True)[1] + 1
    return MaskWords(words=token_words(streams, both=is_image), documents=np.zeros(len(numbers), np.int32))


def packed(masks: Sequence[MaskWords], num_tokens: int | None = None) -> MaskWords:
    """Concatenates sequences that do not see each other, and pads them to ``num_tokens``.

    Documents are renumbered in order.
    """
    if not masks:
        raise ValueError("no masks to pack; pass at least one")
    count = sum(mask.num_tokens for mask in masks)
    num_padding = 0 if num_tokens is None else num_tokens - count
    if num_padding < 0:
        raise ValueError(f"num_tokens={num_tokens} is less than the {count} packed tokens; use {count} or more")
    documents, num_documents = [], 0
    for mask in masks:
        numbers, inverse = np.unique(mask.documents, return_inverse=True)
        is_padding = numbers < 0
        renumbered = np.where(is_padding, PADDING, num_documents + np.cumsum(~is_padding) - 1)
        documents.append(renumbered[inverse].astype(np.int32))
        num_documents += int((~is_padding).sum())
    return MaskWords(
        words=np.concatenate([*(mask.words for mask in masks), np.full(num_padding, token_words(0))]),
        documents=np.concatenate([*documents, np.full(num_padding, PADDING, np.int32)]),
    )


def _check(words: Words, documents: Documents) -> None:
    first = np.flatnonzero((words[1:] != words[:-1]) | (documents[1:] != documents[:-1])) + 1
    starts = np.r_[0, first]  # the first token represents its run
    word, document = words[starts], documents[starts]
    stream = word >> STREAM_SHIFT & 63
    refusals = {
        "uses bit 63 of its word; leave it 0": word < 0,
        f"has a stream above {MAX_STREAMS - 1}; number the streams of each document from 0": stream >= MAX_STREAMS,
        "sees its own stream in both directions without attending it; set that stream's bit, or clear bit 62": (
            word & BOTH != 0
        )
        & (word >> stream & 1 == 0),
        "has a document below -1; number documents from 0, and use -1 for padding": document < PADDING,
    }
    for reason, is_refused in refusals.items():
        if is_refused.any():
            raise ValueError(f"token {starts[np.argmax(is_refused)]} {reason}")
    tokens = np.flatnonzero(document >= 0)
    begins = tokens[np.r_[True, np.diff(document[tokens]) != 0]] if len(tokens) else tokens
    _, first_of = np.unique(document[begins], return_index=True)
    again = np.setdiff1d(begins, begins[first_of])
    if len(again):
        raise ValueError(
            f"document {document[again[0]]} continues at token {starts[again[0]]} after another one; "
            "make the tokens of each document contiguous"
        )
