"""Masks drawn without a pattern, and what a dense matrix says of them."""

from __future__ import annotations

import numpy as np

from mosaic.context.words import MAX_STREAMS, MaskWords, token_words


def odd_mask(seed: int, num_tokens: int) -> MaskWords:
    """Runs of any length and word, documents of any length, padding in and between them."""
    draw = np.random.RandomState(seed)
    streams, attends, both, documents = [], [], [], []
    document, num_streams = 0, draw.choice([1, 3, MAX_STREAMS])
    while len(streams) < num_tokens:
        length = draw.choice([1, 2, 5, 40])
        stream = draw.randint(num_streams)
        sees = int(draw.randint(0, 1 << 30)) << 26 | int(draw.randint(0, 1 << 26))
        is_both = draw.rand() < 0.4
        document += draw.rand() < 0.2
        streams += [stream] * length
        attends += [sees | (1 << stream if is_both else 0)] * length
        both += [is_both] * length
        documents += [-1 if draw.rand() < 0.1 else document] * length
    cut = slice(0, num_tokens)
    words = token_words(streams[cut], attends[cut], both[cut])
    return MaskWords(words=words, documents=np.array(documents[cut], np.int32))


def blocked(mask: MaskWords, block: int, window: int | None = None) -> np.ndarray:
    """Visible pairs of every tile, counted in the matrix; shape (blocks, blocks)."""
    count = -(-mask.num_tokens // block)
    filled = np.zeros((count * block, count * block), np.int64)
    filled[: mask.num_tokens, : mask.num_tokens] = mask.dense(window)
    return filled.reshape(count, block, count, block).sum(axis=(1, 3))
