"""Models of Qwen: language models that see, and those that hear, too."""

from __future__ import annotations

import torch
import transformers as tf

from bench.sweep.models.pieces import LANGUAGE, MEL, Made, labelled, real, with_marks, words


def _qwen_vision(**more):
    return {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, **more}


_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def _qwen_batch(drawn):
    """Returns four images of 4 x 4 patches, each of which becomes 4 tokens."""
    tokens = with_marks(words(drawn, length=16), 3, 4, start=2)
    return labelled(
        with_marks(tokens, 5, 1),
        pixel_values=real(drawn, 4 * 16, 3 * 2 * 8 * 8),
        image_grid_thw=torch.tensor([[1, 4, 4]] * 4),
        mm_token_type_ids=(tokens == 3).long(),
    )


_QWEN_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}


def qwen2_vl() -> Made:
    config = tf.Qwen2VLConfig(
        vision_config=_qwen_vision(embed_dim=32, hidden_size=32, mlp_ratio=2),
        text_config={**LANGUAGE, "rope_scaling": _ROPE, "rope_parameters": _ROPE},
        **_QWEN_TOKENS,
    )
    return tf.Qwen2VLForConditionalGeneration(config), _qwen_batch


def qwen2_5_vl() -> Made:
    vision = _qwen_vision(
        hidden_size=32, intermediate_size=64, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
    )
    config = tf.Qwen2_5_VLConfig(
        vision_config=vision, text_config={**LANGUAGE, "rope_scaling": _ROPE, "rope_parameters": _ROPE}, **_QWEN_TOKENS
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config), _qwen_batch


def qwen3_vl() -> Made:
    vision = _qwen_vision(hidden_size=32, intermediate_size=64, out_hidden_size=32, num_position_embeddings=16)
    config = tf.Qwen3VLConfig(
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        text_config={**LANGUAGE, "rope_scaling": _ROPE, "rope_parameters": _ROPE},
        **_QWEN_TOKENS,
    )
    return tf.Qwen3VLForConditionalGeneration(config), _qwen_batch


def _omni_batch(drawn):
    """Returns images, and sounds of 16 frames that become 4 tokens each."""
    inputs = _qwen_batch(drawn)
    tokens = with_marks(with_marks(inputs["input_ids"], 7, 4, start=10), 8, 1, start=9)
    sounds = {"input_features": real(drawn, 4, 16, 16), "feature_attention_mask": torch.ones(4, 16, dtype=torch.long)}
    return {**inputs, "input_ids": tokens, "labels": tokens, **sounds}


def qwen2_5_omni_thinker() -> Made:
    vision = _qwen_vision(
        hidden_size=32, intermediate_size=64, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
    )
    audio = {**MEL, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    config = tf.Qwen2_5OmniThinkerConfig(
        vision_config=vision,
        audio_config={**audio, "output_dim": 32, "n_window": 8},
        text_config={**LANGUAGE, "rope_scaling": _ROPE, "rope_parameters": _ROPE},
        image_token_index=3,
        video_token_index=4,
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        audio_token_index=7,
        audio_token_id=7,
        audio_start_token_id=8,
    )
    return tf.Qwen2_5OmniThinkerForConditionalGeneration(config), _omni_batch


def qwen2_5_omni_thinker_other_lengths() -> Made:
    """Makes the same model, with sounds of other lengths in tensors of the same shapes in each step."""
    model, _ = qwen2_5_omni_thinker()

    def draw(drawn):
        inputs = _omni_batch(drawn)
        shorter = int(torch.randint(0, 2, (), generator=drawn))
        for row, length in enumerate((16 - 2 * shorter, 12 + 2 * shorter)):  # 4 + 3 tokens, or 3 + 3
            inputs["feature_attention_mask"][row, length:] = 0
            inputs["input_ids"][row, 10 + length // 4 : 14] = 20
        return {**inputs, "labels": inputs["input_ids"]}

    return model, draw


def qwen3_omni_moe_thinker() -> Made:
    vision = _qwen_vision(hidden_size=32, intermediate_size=64, out_hidden_size=32, num_position_embeddings=16)
    audio = {**MEL, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    config = tf.Qwen3OmniMoeThinkerConfig(
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        audio_config={**audio, "output_dim": 32, "n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8},
        text_config={**LANGUAGE, **experts, "rope_scaling": _ROPE, "rope_parameters": _ROPE},
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        audio_token_id=7,
        audio_start_token_id=8,
    )

    def draw(drawn):
        inputs = _omni_batch(drawn)
        inputs["input_ids"][:, 12:14] = 20  # 16 frames become 2 tokens here
        return {**inputs, "labels": inputs["input_ids"]}

    return tf.Qwen3OmniMoeThinkerForConditionalGeneration(config), draw
