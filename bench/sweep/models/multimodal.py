"""Towers beside each other, and language models that see and hear."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

from bench.sweep.models.pieces import LANGUAGE, SIZES, TEXT, VISION, Made, images, labelled, real, with_marks, words

MEL = {"num_mel_bins": 16, "max_source_positions": 32}


def _pair(drawn):
    return {"input_ids": words(drawn), "pixel_values": images(drawn), "return_loss": True}


def clip() -> Made:
    return tf.CLIPModel(
        tf.CLIPConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=16)
    ), _pair


def siglip() -> Made:
    return tf.SiglipModel(tf.SiglipConfig(text_config=TEXT, vision_config=VISION)), _pair


def metaclip_2() -> Made:
    config = tf.MetaClip2Config(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=16)
    return tf.MetaClip2Model(config), _pair


def chinese_clip() -> Made:
    return tf.ChineseCLIPModel(tf.ChineseCLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)), _pair


def alt_clip() -> Made:
    text = {**TEXT, "project_dim": 32, "max_position_embeddings": 80}
    return tf.AltCLIPModel(tf.AltCLIPConfig(text_config=text, vision_config=VISION, projection_dim=32)), _pair


def align() -> Made:
    vision = {"image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 32}
    vision |= {"kernel_sizes": [3, 3], "in_channels": [32, 16], "out_channels": [16, 32], "strides": [1, 2]}
    vision |= {"depthwise_padding": [], "num_block_repeats": [1, 1], "expand_ratios": [1, 2]}
    return tf.AlignModel(tf.AlignConfig(text_config=TEXT, vision_config=vision, projection_dim=32)), _pair


def vision_text_dual_encoder() -> Made:
    config = tf.VisionTextDualEncoderConfig.from_vision_text_configs(
        tf.ViTConfig(**VISION), tf.BertConfig(**TEXT), projection_dim=16
    )
    return tf.VisionTextDualEncoderModel(config), _pair


def clap() -> Made:
    audio = {"window_size": 4, "num_mel_bins": 16, "spec_size": 64, "hidden_size": 64, "patch_size": 4}
    audio |= {"patch_stride": [4, 4], "depths": [1, 1], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 32}
    config = tf.ClapConfig(text_config={**TEXT, "max_position_embeddings": 80}, audio_config=audio, projection_dim=32)
    return tf.ClapModel(config), lambda drawn: {
        "input_ids": words(drawn),
        "input_features": real(drawn, 4, 1, 64, 16),
        "is_longer": torch.zeros(4, 1, dtype=torch.bool),
        "return_loss": True,
    }


def group_vit() -> Made:
    vision = {**VISION, "depths": [1, 1, 0], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 0]}
    config = tf.GroupViTConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=vision, projection_dim=16)
    return tf.GroupViTModel(config), _pair


def x_clip() -> Made:
    vision = {
        **VISION,
        "num_frames": 2,
        "mit_hidden_size": 32,
        "mit_intermediate_size": 64,
        "mit_num_attention_heads": 4,
    }
    config = tf.XCLIPConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=vision, projection_dim=32)
    return tf.XCLIPModel(config), lambda drawn: {
        "input_ids": words(drawn),
        "pixel_values": real(drawn, 4, 2, 3, 32, 32),
        "return_loss": True,
    }


def owl_vit() -> Made:
    config = tf.OwlViTConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=32)
    return tf.OwlViTForObjectDetection(config), lambda drawn: {"input_ids": words(drawn), "pixel_values": images(drawn)}


def flava() -> Made:
    config = tf.FlavaConfig(
        text_config=TEXT, image_config=VISION, multimodal_config=SIZES, image_codebook_config={}, projection_dim=16
    )
    return tf.FlavaModel(config), lambda drawn: {"input_ids": words(drawn), "pixel_values": images(drawn)}


def blip() -> Made:
    text = {**TEXT, "encoder_hidden_size": 32, "projection_dim": 32, "bos_token_id": 1, "sep_token_id": 2}
    return tf.BlipModel(tf.BlipConfig(text_config=text, vision_config=VISION, projection_dim=16)), _pair


def bridge_tower() -> Made:
    config = tf.BridgeTowerConfig(
        text_config={**TEXT, "max_position_embeddings": 80, "hidden_size": 64},
        vision_config={**VISION, "num_hidden_layers": 3, "hidden_size": 64},
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        contrastive_hidden_size=16,
    )
    return tf.BridgeTowerModel(config), lambda drawn: {"input_ids": words(drawn), "pixel_values": images(drawn)}


def vilt() -> Made:
    config = tf.ViltConfig(**TEXT, image_size=32, patch_size=8, max_image_length=16)
    return tf.ViltModel(config), lambda drawn: {"input_ids": words(drawn), "pixel_values": images(drawn)}


def lxmert() -> Made:
    config = tf.LxmertConfig(**TEXT, l_layers=2, x_layers=1, r_layers=1, visual_feat_dim=16)
    return tf.LxmertModel(config), lambda drawn: {
        "input_ids": words(drawn),
        "visual_feats": real(drawn, 4, 6, 16),
        "visual_pos": real(drawn, 4, 6, 4),
    }


def llava() -> Made:
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION), text_config=tf.LlamaConfig(**LANGUAGE), image_token_index=3
    )
    return tf.LlavaForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16), pixel_values=images(drawn), use_cache=False
    )


def llava_onevision() -> Made:
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(**VISION),
        text_config=tf.Qwen2Config(**LANGUAGE),
        image_token_index=3,
        video_token_index=4,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_grid_pinpoints=[[32, 32]],
    )
    return tf.LlavaOnevisionForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=48), 3, 36),
        pixel_values=real(drawn, 4, 2, 3, 32, 32),
        image_sizes=torch.full((4, 2), 32),
        use_cache=False,
    )


def paligemma() -> Made:
    config = tf.PaliGemmaConfig(
        vision_config=tf.SiglipVisionConfig(**VISION, projection_dim=32),
        text_config=tf.GemmaConfig(**LANGUAGE),
        image_token_id=3,
        projection_dim=32,
    )
    return tf.PaliGemmaForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16),
        pixel_values=images(drawn),
        token_type_ids=torch.ones(4, 24, dtype=torch.long),
    )


def gemma3_with_images() -> Made:
    config = tf.Gemma3Config(
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        text_config={**LANGUAGE, "sliding_window": 8},
        mm_tokens_per_image=4,
        image_token_index=3,
        boi_token_index=4,
        eoi_token_index=5,
    )
    return tf.Gemma3ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 4),
        pixel_values=images(drawn),
        token_type_ids=with_marks(torch.zeros(4, 16, dtype=torch.long), 1, 4),
    )


def idefics3() -> Made:
    config = tf.Idefics3Config(
        vision_config={**VISION}, text_config=tf.LlamaConfig(**LANGUAGE), image_token_id=3, scale_factor=2
    )
    return tf.Idefics3ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 4), pixel_values=real(drawn, 4, 1, 3, 32, 32)
    )


def intern_vl() -> Made:
    config = tf.InternVLConfig(
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config=tf.Qwen2Config(**LANGUAGE),
        image_token_id=3,
        downsample_ratio=0.5,
    )
    return tf.InternVLForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 4), pixel_values=images(drawn)
    )


def mistral3() -> Made:
    config = tf.Mistral3Config(
        vision_config=tf.PixtralVisionConfig(**VISION, head_dim=8),
        text_config=tf.MistralConfig(**LANGUAGE),
        image_token_index=3,
        spatial_merge_size=2,
    )
    return tf.Mistral3ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 4), pixel_values=images(drawn), image_sizes=torch.full((4, 2), 32)
    )


def blip_2() -> Made:
    config = tf.Blip2Config(
        vision_config=VISION,
        qformer_config={**TEXT, "encoder_hidden_size": 32},
        text_config=tf.OPTConfig(
            **SIZES, vocab_size=99, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64
        ),
        num_query_tokens=6,
        image_token_index=3,
    )
    return tf.Blip2ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 6), pixel_values=images(drawn)
    )


def git() -> Made:
    config = tf.GitConfig(vision_config=VISION, **TEXT, bos_token_id=1, eos_token_id=2)
    return tf.GitForCausalLM(config), lambda drawn: labelled(words(drawn), pixel_values=images(drawn))


def kosmos2() -> Made:
    text = {"vocab_size": 99, "embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 4}
    config = tf.Kosmos2Config(text_config=text, vision_config=VISION, latent_query_num=4)
    return tf.Kosmos2ForConditionalGeneration(config), lambda drawn: labelled(
        words(drawn, length=16),
        pixel_values=images(drawn),
        image_embeds_position_mask=with_marks(torch.zeros(4, 16, dtype=torch.long), 1, 4),
    )


def mllama() -> Made:
    vision = {**SIZES, "image_size": 32, "patch_size": 8, "num_global_layers": 1, "vision_output_dim": 64}
    vision |= {
        "attention_heads": 4,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**LANGUAGE, "cross_attention_layers": [1], "rope_scaling": rope, "rope_parameters": rope}
    return tf.MllamaForConditionalGeneration(
        tf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=3)
    ), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 1),
        pixel_values=real(drawn, 4, 1, 1, 3, 32, 32),
        aspect_ratio_ids=torch.ones(4, 1, dtype=torch.long),
        aspect_ratio_mask=torch.ones(4, 1, 1, dtype=torch.long),
        cross_attention_mask=torch.ones(4, 16, 1, 1, dtype=torch.long),
    )


def florence2() -> Made:
    vision = {"embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4], "depths": [1, 1], "projection_dim": 32}
    vision |= {"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]}
    vision |= {"window_size": 4}
    text = tf.BartConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    config = tf.Florence2Config(vision_config=vision, text_config=text, image_token_id=3)
    return tf.Florence2ForConditionalGeneration(config), lambda drawn: {
        "input_ids": with_marks(words(drawn, length=24), 3, 17),
        "pixel_values": images(drawn),
        "labels": words(drawn, length=6),
    }


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


def audio_flamingo3() -> Made:
    config = tf.AudioFlamingo3Config(
        audio_config={**SIZES, **MEL}, text_config=tf.Qwen2Config(**LANGUAGE), audio_token_id=3
    )
    return tf.AudioFlamingo3ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16),
        input_features=real(drawn, 4, 16, 64),
        input_features_mask=torch.ones(4, 64, dtype=torch.long),
    )


def janus() -> Made:
    config = tf.JanusConfig(
        vision_config={**VISION, "projection_dim": 32, "num_image_tokens": 16, "depth": 1, "mlp_ratio": 2},
        vq_config={"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1],
                   "num_patches": 4, "latent_channels": 8, "num_res_blocks": 1, "projection_dim": 32,
                   "image_token_embed_dim": 32},
        text_config=tf.LlamaConfig(**LANGUAGE),
        image_token_id=3,
    )  # fmt: skip
    return tf.JanusForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=24), 3, 16), pixel_values=images(drawn)
    )


def instruct_blip() -> Made:
    config = tf.InstructBlipConfig(
        vision_config=VISION,
        qformer_config={**TEXT, "encoder_hidden_size": 32},
        text_config=tf.OPTConfig(
            **SIZES, vocab_size=99, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64
        ),
        num_query_tokens=6,
        image_token_index=3,
    )
    return tf.InstructBlipForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 6), pixel_values=images(drawn), qformer_input_ids=words(drawn)
    )


def smol_vlm() -> Made:
    config = tf.SmolVLMConfig(
        vision_config={**VISION}, text_config=tf.LlamaConfig(**LANGUAGE), image_token_id=3, scale_factor=2
    )
    return tf.SmolVLMForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 4), pixel_values=real(drawn, 4, 1, 3, 32, 32), use_cache=False
    )


def pix2struct() -> Made:
    text = {"vocab_size": 99, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8, "num_hidden_layers": 2,
              "num_attention_heads": 4, "seq_len": 16}  # fmt: skip
    config = tf.Pix2StructConfig(text_config={**text, "decoder_start_token_id": 0}, vision_config=vision)
    return tf.Pix2StructForConditionalGeneration(config), lambda drawn: {
        "flattened_patches": real(drawn, 4, 16, 50).abs(),
        "labels": words(drawn, length=6),
    }


def clip_with_all_hidden_states() -> Made:
    model, draw = clip()
    return model, lambda drawn: {**draw(drawn), "output_hidden_states": True}


def llava_with_all_hidden_states() -> Made:
    model, draw = llava()
    return model, lambda drawn: {**draw(drawn), "output_hidden_states": True}


def clip_distilled() -> Made:
    """Makes a pair of models of which the frozen one teaches the other by its hidden states."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = tf.CLIPVisionConfig(**VISION, attn_implementation="eager")
            self.student, self.teacher = tf.CLIPVisionModel(config), tf.CLIPVisionModel(config).requires_grad_(False)

        def forward(self, pixel_values):
            student = self.student(pixel_values, output_hidden_states=True, output_attentions=True)
            with torch.no_grad():
                teacher = self.teacher(pixel_values, output_hidden_states=True)
            pairs = zip(student.hidden_states, teacher.hidden_states, strict=True)
            return sum((mine - theirs).square().mean() for mine, theirs in pairs) + student.attentions[0].std()

    return Distilled(), lambda drawn: {"pixel_values": images(drawn)}
