"""Language models that hear."""

from __future__ import annotations

import torch
import transformers as tf

from bench.sweep.models.pieces import LANGUAGE, MEL, SIZES, Made, labelled, real, with_marks, words


def qwen2_audio() -> Made:
    audio = {**MEL, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    config = tf.Qwen2AudioConfig(audio_config=audio, text_config=tf.Qwen2Config(**LANGUAGE), audio_token_index=3)
    return tf.Qwen2AudioForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16),
        input_features=real(drawn, 4, 16, 64),
        feature_attention_mask=torch.ones(4, 64, dtype=torch.long),
    )


def voxtral() -> Made:
    audio = {**SIZES, **MEL}
    config = tf.VoxtralConfig(audio_config=audio, text_config=tf.LlamaConfig(**LANGUAGE), audio_token_id=3)
    return tf.VoxtralForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16), input_features=real(drawn, 4, 16, 64)
    )


def granite_speech() -> Made:
    encoder = {"feedforward_mult": 2, "hidden_dim": 32, "dim_head": 8, "num_heads": 4, "num_layers": 2, "input_dim": 16}
    encoder |= {"output_dim": 8, "context_size": 16, "max_pos_emb": 16, "conv_kernel_size": 3}
    config = tf.GraniteSpeechConfig(
        encoder_config=encoder,
        projector_config={**SIZES, "model_type": "blip_2_qformer", "encoder_hidden_size": 32, "vocab_size": 99},
        text_config=tf.GraniteConfig(**LANGUAGE),
        audio_token_index=3,
        window_size=8,
        downsample_rate=2,
        has_lora_adapter=False,
    )
    return tf.GraniteSpeechForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16),
        input_features=real(drawn, 4, 32, 16),
        input_features_mask=torch.ones(4, 16, dtype=torch.bool),
    )


def audio_flamingo3() -> Made:
    config = tf.AudioFlamingo3Config(
        audio_config={**SIZES, **MEL}, text_config=tf.Qwen2Config(**LANGUAGE), audio_token_id=3
    )
    return tf.AudioFlamingo3ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16),
        input_features=real(drawn, 4, 16, 64),
        input_features_mask=torch.ones(4, 64, dtype=torch.long),
    )
