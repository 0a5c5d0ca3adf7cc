"""Language models that see."""

from __future__ import annotations

import torch
import transformers as tf

from bench.sweep.models.pieces import LANGUAGE, SIZES, TEXT, VISION, Made, images, labelled, real, with_marks, words


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


def idefics2() -> Made:
    resampler = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4}
    config = tf.Idefics2Config(
        vision_config={**VISION},
        text_config=tf.MistralConfig(**LANGUAGE),
        perceiver_config={**resampler, "resampler_head_dim": 8, "num_key_value_heads": 2},
        image_token_id=3,
    )
    return tf.Idefics2ForConditionalGeneration(config), lambda drawn: labelled(
        with_marks(words(drawn, length=16), 3, 4), pixel_values=real(drawn, 4, 1, 3, 32, 32), use_cache=False
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


def blip_captions() -> Made:
    text = {**TEXT, "encoder_hidden_size": 32, "projection_dim": 32, "bos_token_id": 1, "sep_token_id": 2}
    config = tf.BlipConfig(text_config=text, vision_config=VISION, projection_dim=16)
    return tf.BlipForConditionalGeneration(config), lambda drawn: labelled(words(drawn), pixel_values=images(drawn))


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


def llava_with_all_hidden_states() -> Made:
    model, draw = llava()
    return model, lambda drawn: {**draw(drawn), "output_hidden_states": True}
