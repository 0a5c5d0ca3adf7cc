from __future__ import annotations

import numpy as np
import pytest

from mosaic.context.words import BOTH, MaskWords, causal, gemma, packed


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # transformers 5.24
def test_gemmas_mask_is_that_of_transformers():
    import torch
    from transformers import Gemma3TextConfig
    from transformers.masking_utils import create_causal_mask

    images = np.array([-1] * 5 + [0] * 6 + [-1] * 4 + [1] * 5 + [-1] * 2)
    config = Gemma3TextConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    theirs = create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, len(images), 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(len(images))[None],
        block_sequence_ids=torch.from_numpy(images)[None],
    )
    assert np.array_equal(gemma(images).dense(), theirs[0, 0].numpy())


def test_packed_documents_see_nothing_of_each_other_and_padding_sees_nothing():
    mask = packed([causal(3), gemma([0, 0]), packed([causal(1), causal(2)], 4)], num_tokens=12)
    expected = np.zeros((12, 12), bool)
    expected[:3, :3] = np.tri(3, dtype=bool)
    expected[3:5, 3:5] = True
    expected[5, 5] = True
    expected[6:8, 6:8] = np.tri(2, dtype=bool)
    assert np.array_equal(mask.dense(), expected)
    assert mask.documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, -1, -1, -1, -1]


def words_of(*words: int) -> dict[str, np.ndarray]:
    return {"words": np.array(words, np.int64), "documents": np.zeros(len(words), np.int32)}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({**words_of(1), "words": np.array([1], np.int32)}, TypeError, "words are int32; use a numpy array of int64"),
        ({**words_of(1), "documents": [0]}, TypeError, "documents are list; use a numpy array of int32"),
        ({**words_of(1, 1), "documents": np.zeros(3, np.int32)}, ValueError, r"words have shape \(2,\)"),
        (words_of(), ValueError, "pass one of each for every token"),
        (words_of(1, -1), ValueError, "token 1 uses bit 63"),
        (words_of(1, 1, 60 << 56), ValueError, "token 2 has a stream above 55; number the streams of each document"),
        (words_of(1, BOTH | 3 << 56 | 1), ValueError, "token 1 sees its own stream in both directions"),
        (
            {**words_of(1, 1, 1), "documents": np.array([0, 1, 0], np.int32)},
            ValueError,
            "document 0 continues at token 2",
        ),
        ({**words_of(1, 1), "documents": np.array([0, -2], np.int32)}, ValueError, "token 1 has a document below -1"),
    ],
)
def test_wrong_words_are_refused_with_the_way_out(given: dict[str, np.ndarray], error: type, says: str):
    with pytest.raises(error, match=says):
        MaskWords(**given)
