"""Sound and text, from one to the other."""

from __future__ import annotations

import torch

from transformers_models.shared_parts import (
    ROWS,
    VOCABULARY,
    Recipe,
    entry,
    reader,
    sequences,
    sound,
    speech,
    taught,
    words,
)


@entry("WhisperForConditionalGeneration")
def whisper_for_conditional_generation() -> Recipe:
    settings = {**sequences(num_mel_bins=16, max_source_positions=16, max_target_positions=24, use_cache=False)}
    return settings, {"input_features": torch.randn(ROWS, 16, 32), "labels": words()}


@entry("Speech2TextForConditionalGeneration")
def speech2_text_for_conditional_generation() -> Recipe:
    settings = sequences(
        input_feat_per_channel=16, max_source_positions=64, max_target_positions=24, conv_channels=32, use_cache=False
    )
    return settings, {"input_features": torch.randn(ROWS, 32, 16), "labels": words()}


@entry("Wav2Vec2ForPreTraining")
def wav2_vec2_for_pre_training() -> Recipe:
    quantizer = {
        "codevector_dim": 16,
        "num_codevectors_per_group": 8,
        "num_codevector_groups": 2,
        "proj_codevector_dim": 16,
    }
    mask = torch.zeros(ROWS, 39, dtype=torch.bool)
    mask[:, ::4] = True
    negatives = torch.randint(0, 39, (ROWS, 39, 3))
    return speech(**quantizer), {
        "input_values": sound(),
        "mask_time_indices": mask,
        "sampled_negative_indices": negatives,
    }


@entry("HubertForCTC")
def hubert_for_ctc() -> Recipe:
    return speech(), {"input_values": sound(), "labels": words(4)}


@entry("SEWForCTC")
def sew_for_ctc() -> Recipe:
    return speech(squeeze_factor=2), {"input_values": sound(), "labels": words(4)}


@entry("SpeechEncoderDecoderModel")
def speech_encoder_decoder_model() -> Recipe:
    from transformers import BertConfig, SpeechEncoderDecoderConfig, Wav2Vec2Config

    decoder = BertConfig(**reader(is_decoder=True, add_cross_attention=True, use_cache=False))
    made = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(Wav2Vec2Config(**speech()), decoder)
    made.decoder_start_token_id, made.pad_token_id = 2, 0
    return made, {"input_values": sound(), "labels": words()}


@entry("SpeechT5ForSpeechToText")
def speech_t5_for_speech_to_text() -> Recipe:
    side = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 4), ("attention_heads", 2), ("ffn_dim", 64))
    }
    settings = {**speech(), **side, "max_text_positions": 24, "positional_dropout": 0.0, "use_cache": False}
    return settings, {"input_values": sound(), "labels": words()}


@entry("MusicgenForConditionalGeneration")
def musicgen_for_conditional_generation() -> Recipe:
    from transformers import EncodecConfig, MusicgenConfig, MusicgenDecoderConfig, T5Config

    text = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=4, num_heads=2)
    audio = EncodecConfig(
        hidden_size=16, num_filters=4, codebook_size=16, codebook_dim=16, upsampling_ratios=[2, 2], num_lstm_layers=1
    )
    decoder = MusicgenDecoderConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        ffn_dim=64,
        num_codebooks=2,
        pad_token_id=16,
        bos_token_id=16,
        use_cache=False,
    )
    made = MusicgenConfig(text_encoder=text.to_dict(), audio_encoder=audio.to_dict(), decoder=decoder.to_dict())
    return made, {"input_ids": words(), "decoder_input_ids": torch.randint(0, 16, (ROWS * 2, 6))}


# Text


@entry("T5ForConditionalGeneration")
def t5_for_conditional_generation() -> Recipe:
    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 4,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
    return settings, {"input_ids": words(), "labels": words()}


@entry("BartForConditionalGeneration")
def bart_for_conditional_generation() -> Recipe:
    return sequences(use_cache=False), {"input_ids": words(), "labels": words()}


@entry("EncoderDecoderModel")
def encoder_decoder_model() -> Recipe:
    from transformers import BertConfig, EncoderDecoderConfig

    decoder = BertConfig(**reader(is_decoder=True, add_cross_attention=True, use_cache=False))
    made = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**reader()), decoder)
    made.decoder_start_token_id, made.pad_token_id = 2, 0
    return made, {"input_ids": words(), "labels": words()}


@entry("BertForMaskedLM")
def bert_for_masked_lm() -> Recipe:
    return reader(), taught({"input_ids": words()})


@entry("GPT2LMHeadModel")
def gpt2_lm_head_model() -> Recipe:
    return {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 2, "use_cache": False}, taught(
        {"input_ids": words()}
    )
