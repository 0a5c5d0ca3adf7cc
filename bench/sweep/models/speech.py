"""Models of speech and sound: encoders, and encoders with decoders."""

from __future__ import annotations

import torch
import transformers as tf

from bench.sweep.models.pieces import SIZES, TEXT, Made, real, words

_WAVES = {
    **SIZES,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 8),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 99,
}


def _waves(drawn):
    return {"input_values": real(drawn, 4, 512), "labels": words(drawn, length=5)}


def wav2vec2_ctc() -> Made:
    return tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**_WAVES, layerdrop=0.3, mask_time_length=2)), _waves


def wav2vec2_pretraining() -> Made:
    """Makes a model that tells the code of a masked sound from other codes; Gumbel noise draws the codes."""
    config = tf.Wav2Vec2Config(
        **_WAVES, codevector_dim=16, num_codevectors_per_group=8, num_codevector_groups=2, proj_codevector_dim=16
    )
    return tf.Wav2Vec2ForPreTraining(config), lambda drawn: {
        "input_values": real(drawn, 4, 512),
        "mask_time_indices": torch.rand(4, 30, generator=drawn) > 0.5,
        "sampled_negative_indices": torch.randint(0, 30, (4, 30, 3), generator=drawn),
    }


def hubert_ctc() -> Made:
    return tf.HubertForCTC(tf.HubertConfig(**_WAVES, mask_time_length=2)), _waves


def wavlm_ctc() -> Made:
    return tf.WavLMForCTC(tf.WavLMConfig(**_WAVES, mask_time_length=2)), _waves


def wav2vec2_bert() -> Made:
    config = tf.Wav2Vec2BertConfig(**SIZES, feature_projection_input_dim=16, vocab_size=99, mask_time_length=2)
    return tf.Wav2Vec2BertModel(config), lambda drawn: {"input_features": real(drawn, 4, 24, 16)}


def audio_spectrogram_transformer() -> Made:
    config = tf.ASTConfig(**SIZES, max_length=32, num_mel_bins=16, patch_size=4, frequency_stride=4, time_stride=4)
    return tf.ASTForAudioClassification(config), lambda drawn: {
        "input_values": real(drawn, 4, 32, 16),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


def whisper() -> Made:
    config = tf.WhisperConfig(
        **_SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        apply_spec_augment=True,
        mask_time_length=2,
    )
    return tf.WhisperForConditionalGeneration(config), lambda drawn: {
        "input_features": real(drawn, 4, 16, 64),
        "labels": words(drawn, length=6),
    }


def speech_to_text() -> Made:
    config = tf.Speech2TextConfig(**_SEQ2SEQ, input_feat_per_channel=16, input_channels=1, conv_channels=16)
    return tf.Speech2TextForConditionalGeneration(config), lambda drawn: {
        "input_features": real(drawn, 4, 40, 16),
        "labels": words(drawn, length=6),
    }


def moonshine() -> Made:
    config = tf.MoonshineConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        decoder_start_token_id=1,
    )  # fmt: skip
    return tf.MoonshineForConditionalGeneration(config), lambda drawn: {
        "input_values": real(drawn, 4, 4096),
        "labels": words(drawn, length=6),
    }


def speecht5_to_text() -> Made:
    sizes = {name: size for name, size in _SEQ2SEQ.items() if name not in ("d_model", "vocab_size")}
    return tf.SpeechT5ForSpeechToText(tf.SpeechT5Config(**_WAVES, **sizes, mask_time_length=2)), _waves


def speech_encoder_decoder() -> Made:
    config = tf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        tf.Wav2Vec2Config(**_WAVES, mask_time_length=2),
        tf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    return tf.SpeechEncoderDecoderModel(config=config), _waves


def musicgen() -> Made:
    config = tf.MusicgenConfig(
        text_encoder=tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99),
        audio_encoder=tf.EncodecConfig(
            hidden_size=32, num_filters=4, upsampling_ratios=[4, 4], codebook_size=64, codebook_dim=32,
            num_lstm_layers=1,
        ),
        decoder={"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_codebooks": 4, "pad_token_id": 0, "bos_token_id": 0},
    )  # fmt: skip
    model = tf.MusicgenForConditionalGeneration(config)
    model.audio_encoder.requires_grad_(False)
    return model, lambda drawn: {"input_ids": words(drawn), "decoder_input_ids": words(drawn, 16, 8, end=64)}


def encodec() -> Made:
    config = tf.EncodecConfig(
        hidden_size=32, num_filters=4, upsampling_ratios=[4, 4], codebook_size=16, codebook_dim=32, num_lstm_layers=1
    )
    return tf.EncodecModel(config), lambda drawn: {"input_values": real(drawn, 2, 1, 512)}


def seamless_m4t() -> Made:
    config = tf.SeamlessM4TConfig(
        vocab_size=99, t2u_vocab_size=99, hidden_size=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, speech_encoder_layers=1,
        speech_encoder_attention_heads=4, speech_encoder_intermediate_size=64, feature_projection_input_dim=16,
        t2u_encoder_layers=1, t2u_decoder_layers=1, unit_embed_dim=8, lang_embed_dim=8, spkr_embed_dim=8,
        upsample_initial_channel=16, pad_token_id=0, decoder_start_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    return tf.SeamlessM4TForSpeechToText(config), lambda drawn: {
        "input_features": real(drawn, 4, 24, 16),
        "labels": words(drawn, length=6),
    }


def sew_ctc() -> Made:
    config = tf.SEWConfig(**_WAVES, squeeze_factor=2, mask_time_length=2)
    return tf.SEWForCTC(config), _waves
