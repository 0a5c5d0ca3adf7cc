"""Random masks of the three kinds measured by Cornstarch (Fig. 11), and the causal mask.

Modality tokens see all of their encoder's output and nothing else; text sees earlier tokens. Lengths are random,
because the paper does not state them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mosaic.context.words import MAX_STREAMS, MaskWords, causal, packed, token_words

DOCUMENT_TOKENS = 16384
"""Mean length of the documents of a long packed sequence."""


def prepended(num_tokens: int, seed: int = 0) -> MaskWords:
    """Draws a sequence that begins with the outputs of two encoders, of a fifth to three fifths in all (EP)."""
    draw = np.random.RandomState(seed)  # stable across versions of numpy
    share, first = draw.uniform(0.2, 0.6), draw.uniform(0.3, 0.7)
    lengths = [int(num_tokens * share * first), int(num_tokens * share * (1 - first))]
    return _document([1, 2, 0], [*lengths, num_tokens - sum(lengths)])


def embedded(num_tokens: int, seed: int = 0, max_images: int = 12) -> MaskWords:
    """Draws text with 3 to ``max_images`` encoder outputs embedded, each of which sees itself (EE)."""
    return _embedded(num_tokens, np.random.RandomState(seed), max_images)


def multimodal_packed(num_tokens: int, seed: int = 0, document_tokens: int | None = None) -> MaskWords:
    """Draws packed documents, each text with encoder outputs embedded (MP).

    Their mean length is 16,384 tokens by default, or an eighth of a shorter sequence.
    """
    draw = np.random.RandomState(seed)
    mean = document_tokens or min(DOCUMENT_TOKENS, max(64, num_tokens // 8))
    documents, left = [], num_tokens
    while left:
        length = min(left, max(64, int(draw.exponential(mean))))
        length = left if left - length < 64 else length
        documents.append(_embedded(length, draw, 12))
        left -= length
    return packed(documents)


DRAWN: dict[str, Callable[[int, int], MaskWords]] = {
    "causal": lambda num_tokens, seed: causal(num_tokens),
    "ep": prepended,
    "ee": embedded,
    "mp": multimodal_packed,
}
"""Functions from a number of tokens and a seed to a mask, by the paper's names."""


def _embedded(num_tokens: int, draw: np.random.RandomState, max_images: int) -> MaskWords:
    images = min(draw.randint(3, max_images + 1), MAX_STREAMS - 1, (num_tokens - 1) // 8)
    cuts = np.sort(draw.choice(np.arange(1, num_tokens), 2 * images, replace=False)) if images else np.arange(0)
    edges = np.concatenate([[0], cuts, [num_tokens]])
    streams = [(index + 1) // 2 if index % 2 else 0 for index in range(len(edges) - 1)]
    return _document(streams, np.diff(edges).tolist())


def _document(streams: list[int], lengths: list[int]) -> MaskWords:
    stream = np.repeat(np.array(streams, np.int64), lengths)
    is_text = stream == 0
    attends = np.where(is_text, np.int64((1 << MAX_STREAMS) - 1), np.int64(1) << stream)
    words = token_words(stream, attends, ~is_text)
    return MaskWords(words=words, documents=np.zeros(len(words), np.int32))
