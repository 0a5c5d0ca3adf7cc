"""Language models that see and hear."""

from __future__ import annotations

from typing import Any

import torch

from transformers_models.shared_parts import (
    IMAGE,
    MARK,
    PATCH,
    PATCHES,
    ROWS,
    VOCABULARY,
    Batch,
    Recipe,
    entry,
    language,
    pixels,
    reader,
    seen,
    seer,
    taught,
    text_and_image,
    tower,
    words,
)


@entry("BlipForConditionalGeneration")
def blip_for_conditional_generation() -> Recipe:
    text = reader(encoder_hidden_size=32, use_cache=False)
    return {"text_config": text, "vision_config": seer(), "image_text_hidden_size": 32}, taught(text_and_image())


@entry("BlipForImageTextRetrieval")
def blip_for_image_text_retrieval() -> Recipe:
    text = reader(encoder_hidden_size=32)
    return {"text_config": text, "vision_config": seer(), "image_text_hidden_size": 32}, text_and_image()


@entry("Blip2ForConditionalGeneration")
def blip2_for_conditional_generation() -> Recipe:
    settings = {
        "vision_config": seer(),
        "qformer_config": tower(vocab_size=VOCABULARY, encoder_hidden_size=32),
        "text_config": {**language("opt"), "ffn_dim": 64, "word_embed_proj_dim": 32},
        "num_query_tokens": 4,
        "image_token_index": MARK,
    }
    return settings, seen(4, pixel_values=pixels())


@entry("InstructBlipForConditionalGeneration")
def instruct_blip_for_conditional_generation() -> Recipe:
    settings, batch = blip2_for_conditional_generation()
    return settings, {**batch, "qformer_input_ids": words()}


@entry("LlavaForConditionalGeneration")
def llava_for_conditional_generation() -> Recipe:
    settings = {"vision_config": {"model_type": "clip_vision_model", **seer()}, "text_config": language("llama")}
    return {**settings, "image_token_index": MARK}, seen(pixel_values=pixels())


@entry("PaliGemmaForConditionalGeneration")
def pali_gemma_for_conditional_generation() -> Recipe:
    settings = {
        "vision_config": {"model_type": "siglip_vision_model", **seer(projection_dim=32)},
        "text_config": language("gemma", head_dim=16),
        "projection_dim": 32,
        "image_token_index": MARK,
    }
    batch = seen(pixel_values=pixels())
    return settings, {**batch, "token_type_ids": torch.ones_like(batch["input_ids"])}


@entry("Gemma3ForConditionalGeneration")
def gemma3_for_conditional_generation() -> Recipe:
    text = {**language("gemma3_text"), "head_dim": 16, "sliding_window": 8}
    settings = {
        "vision_config": {"model_type": "siglip_vision_model", **seer()},
        "text_config": text,
        "mm_tokens_per_image": PATCHES,
        "image_token_index": MARK,
        "boi_token_index": 37,
        "eoi_token_index": 38,
    }
    batch = seen(pixel_values=pixels())
    return settings, {**batch, "token_type_ids": (batch["input_ids"] == MARK).long()}


@entry("Idefics2ForConditionalGeneration")
def idefics2_for_conditional_generation() -> Recipe:
    settings = {
        "vision_config": seer(),
        "text_config": language("mistral", pad_token_id=0),
        "image_token_id": MARK,
        "perceiver_config": {
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 1,
        },
    }
    return settings, seen(4, pixel_values=pixels()[:, None])


@entry("Idefics3ForConditionalGeneration")
def idefics3_for_conditional_generation() -> Recipe:
    settings = {
        "vision_config": seer(),
        "text_config": language("llama", pad_token_id=0),
        "image_token_id": MARK,
        "scale_factor": 2,
    }
    return settings, seen(1, pixel_values=pixels()[:, None])


@entry("SmolVLMForConditionalGeneration")
def smol_vlm_for_conditional_generation() -> Recipe:
    return idefics3_for_conditional_generation()


@entry("InternVLForConditionalGeneration")
def intern_vl_for_conditional_generation() -> Recipe:
    vision = seer(image_size=[IMAGE, IMAGE], patch_size=[PATCH, PATCH])
    settings = {
        "vision_config": vision,
        "text_config": language("qwen2"),
        "image_token_id": MARK,
        "image_seq_length": 1,
        "downsample_ratio": 0.5,
    }
    return settings, seen(1, pixel_values=pixels())


def grid(kind: str, **vision: Any) -> tuple[dict[str, Any], Batch]:
    settings = {
        "vision_config": vision,
        "image_token_id": MARK,
        "video_token_id": 36,
        "vision_start_token_id": 37,
        "vision_end_token_id": 38,
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**language(kind), "rope_parameters": rope, "rope_scaling": rope, "head_dim": 16}
    images = {"pixel_values": torch.randn(ROWS * 16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS)}
    batch = seen(4, **images)
    batch["mm_token_type_ids"] = (batch["input_ids"] == MARK).long()
    return {**settings, "text_config": text}, batch


@entry("Qwen2VLForConditionalGeneration")
def qwen2_vl_for_conditional_generation() -> Recipe:
    return grid("qwen2_vl_text", depth=4, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4)


@entry("Qwen2_5_VLForConditionalGeneration")
def qwen2_5_vl_for_conditional_generation() -> Recipe:
    return grid(
        "qwen2_5_vl_text",
        depth=4,
        hidden_size=32,
        out_hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        patch_size=4,
        window_size=16,
        fullatt_block_indexes=[1, 3],
    )


@entry("Qwen3VLForConditionalGeneration")
def qwen3_vl_for_conditional_generation() -> Recipe:
    return grid(
        "qwen3_vl_text",
        depth=4,
        hidden_size=32,
        out_hidden_size=32,
        intermediate_size=128,
        num_heads=2,
        patch_size=4,
        num_position_embeddings=16,
        deepstack_visual_indexes=[1],
    )


@entry("Qwen2AudioForConditionalGeneration")
def qwen2_audio_for_conditional_generation() -> Recipe:
    audio = {
        "d_model": 32,
        "encoder_layers": 4,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 16,
    }
    settings = {"audio_config": audio, "text_config": language("qwen2"), "audio_token_index": MARK}
    heard = {"input_features": torch.randn(ROWS, 16, 32), "feature_attention_mask": torch.ones(ROWS, 32).long()}
    return settings, seen(8, **heard)


@entry("Qwen2_5OmniThinkerForConditionalGeneration")
def qwen2_5_omni_thinker_for_conditional_generation() -> Recipe:
    audio = {
        "d_model": 32,
        "encoder_layers": 4,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 16,
        "n_window": 8,
        "output_dim": 32,
    }
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
    }
    settings, batch = grid("qwen2_5_omni_text", **vision)
    settings |= {"audio_config": audio, "audio_token_id": 35, "audio_token_index": 35, "image_token_index": MARK}
    tokens = batch["input_ids"]
    tokens = torch.cat([tokens, torch.full((ROWS, 8), 35)], 1)
    del batch["mm_token_type_ids"]
    return settings, {
        **taught({**batch, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}),
        "input_features": torch.randn(ROWS, 16, 32),
        "feature_attention_mask": torch.ones(ROWS, 32).long(),
    }
