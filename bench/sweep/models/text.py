"""Language models: encoders with decoders, mixtures of experts, state spaces, encoders and decoders alone."""

from __future__ import annotations

import torch
import transformers as tf

from bench.sweep.models.pieces import LANGUAGE, SIZES, TEXT, Made, labelled, real, words

_SEQ2SEQ = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _translated(drawn):
    return {"input_ids": words(drawn), "labels": words(drawn, length=8)}


def _predicted(drawn):
    return labelled(words(drawn, length=16))


def t5() -> Made:
    return tf.T5ForConditionalGeneration(tf.T5Config(**_T5)), _translated


def long_t5() -> Made:
    config = tf.LongT5Config(**_T5, local_radius=4, encoder_attention_type="transient-global", global_block_size=4)
    return tf.LongT5ForConditionalGeneration(config), _translated


def switch_transformers() -> Made:
    config = tf.SwitchTransformersConfig(
        **_T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.1
    )
    return tf.SwitchTransformersForConditionalGeneration(config), _translated


def bart() -> Made:
    return tf.BartForConditionalGeneration(
        tf.BartConfig(**_SEQ2SEQ, encoder_layerdrop=0.2, decoder_layerdrop=0.2)
    ), _translated


def m2m_100() -> Made:
    return tf.M2M100ForConditionalGeneration(tf.M2M100Config(**_SEQ2SEQ)), _translated


def led() -> Made:
    config = tf.LEDConfig(
        **{name: size for name, size in _SEQ2SEQ.items() if name != "max_position_embeddings"},
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=4,
    )  # fmt: skip
    return tf.LEDForConditionalGeneration(config), _translated


def prophet_net() -> Made:
    config = tf.ProphetNetConfig(
        vocab_size=99, hidden_size=32, encoder_ffn_dim=64, num_encoder_layers=2, num_encoder_attention_heads=4,
        decoder_ffn_dim=64, num_decoder_layers=2, num_decoder_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    return tf.ProphetNetForConditionalGeneration(config), _translated


def encoder_decoder() -> Made:
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(
        tf.BertConfig(**TEXT),
        tf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    return tf.EncoderDecoderModel(config=config), _translated


def mixtral() -> Made:
    config = tf.MixtralConfig(**LANGUAGE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return tf.MixtralForCausalLM(config), _predicted


def qwen2_moe() -> Made:
    config = tf.Qwen2MoeConfig(
        **LANGUAGE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    )
    return tf.Qwen2MoeForCausalLM(config), _predicted


def deepseek_v3() -> Made:
    config = tf.DeepseekV3Config(
        **{**LANGUAGE, "num_key_value_heads": 4, "head_dim": 4}, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1,
    )  # fmt: skip
    return tf.DeepseekV3ForCausalLM(config), _predicted


def mamba() -> Made:
    config = tf.MambaConfig(vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2, use_cache=False)
    return tf.MambaForCausalLM(config), _predicted


def mamba2() -> Made:
    config = tf.Mamba2Config(
        vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=1,
        chunk_size=8, use_cache=False,
    )  # fmt: skip
    return tf.Mamba2ForCausalLM(config), _predicted


def jamba() -> Made:
    config = tf.JambaConfig(
        **LANGUAGE, num_experts=2, num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    return tf.JambaForCausalLM(config), _predicted


def recurrent_gemma() -> Made:
    config = tf.RecurrentGemmaConfig(
        **{k: v for k, v in LANGUAGE.items() if k not in ("head_dim", "max_position_embeddings")},
        lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"], use_cache=False,
    )  # fmt: skip
    return tf.RecurrentGemmaForCausalLM(config), _predicted


def rwkv() -> Made:
    config = tf.RwkvConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=32
    )
    return tf.RwkvForCausalLM(config), _predicted


def llama_with_cache() -> Made:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**LANGUAGE)), _predicted


def gemma2() -> Made:
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**LANGUAGE, sliding_window=8)), _predicted


def gpt2() -> Made:
    config = tf.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config), _predicted


def bert_masked() -> Made:
    return tf.BertForMaskedLM(tf.BertConfig(**TEXT)), _predicted


def deberta_v2() -> Made:
    config = tf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0)
    return tf.DebertaV2ForMaskedLM(config), _predicted


def longformer() -> Made:
    config = tf.LongformerConfig(**{**TEXT, "max_position_embeddings": 80}, attention_window=4)
    return tf.LongformerForMaskedLM(config), _predicted


def big_bird() -> Made:
    config = tf.BigBirdConfig(**{**TEXT, "max_position_embeddings": 128}, block_size=4, num_random_blocks=1)
    return tf.BigBirdForMaskedLM(config), lambda drawn: labelled(words(drawn, length=64))


def xlnet() -> Made:
    config = tf.XLNetConfig(vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=64)
    return tf.XLNetLMHeadModel(config), _predicted


def funnel() -> Made:
    config = tf.FunnelConfig(vocab_size=99, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=64)
    return tf.FunnelForMaskedLM(config), _predicted


def canine() -> Made:
    config = tf.CanineConfig(
        **SIZES, max_position_embeddings=64, num_hash_buckets=64, num_hash_functions=4, local_transformer_stride=8,
        downsampling_rate=4,
    )  # fmt: skip
    return tf.CanineForTokenClassification(config), lambda drawn: {
        "input_ids": words(drawn, length=16),
        "labels": torch.zeros(4, 16, dtype=torch.long),
    }


def layout_lmv3() -> Made:
    config = tf.LayoutLMv3Config(
        **TEXT, input_size=32, patch_size=8, coordinate_size=4, shape_size=8, max_2d_position_embeddings=64
    )
    return tf.LayoutLMv3ForTokenClassification(config), lambda drawn: {
        "input_ids": words(drawn),
        "bbox": torch.randint(0, 30, (4, 12, 2), generator=drawn).repeat(1, 1, 2).cumsum(-1).clamp(max=60),
        "pixel_values": real(drawn, 4, 3, 32, 32),
        "labels": torch.zeros(4, 12, dtype=torch.long),
    }


def dense_retriever() -> Made:
    return tf.DPRReader(tf.DPRConfig(**SIZES, vocab_size=99)), lambda drawn: {"input_ids": words(drawn)}


def time_series_transformer() -> Made:
    config = tf.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, d_model=16,
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    return tf.TimeSeriesTransformerForPrediction(config), lambda drawn: {
        "past_values": real(drawn, 4, 10),
        "past_time_features": real(drawn, 4, 10, 1),
        "past_observed_mask": torch.ones(4, 10),
        "future_values": real(drawn, 4, 4),
        "future_time_features": real(drawn, 4, 4, 1),
    }


def patch_tst() -> Made:
    config = tf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=16,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=32,
    )  # fmt: skip
    return tf.PatchTSTForPrediction(config), lambda drawn: {
        "past_values": real(drawn, 4, 16, 2),
        "future_values": real(drawn, 4, 4, 2),
    }


def decision_transformer() -> Made:
    config = tf.DecisionTransformerConfig(state_dim=5, act_dim=3, hidden_size=32, n_layer=2, n_head=4, max_ep_len=16)
    return tf.DecisionTransformerModel(config), lambda drawn: {
        "states": real(drawn, 4, 6, 5),
        "actions": real(drawn, 4, 6, 3),
        "rewards": real(drawn, 4, 6, 1),
        "returns_to_go": real(drawn, 4, 6, 1),
        "timesteps": torch.arange(6).repeat(4, 1),
        "attention_mask": torch.ones(4, 6),
    }
