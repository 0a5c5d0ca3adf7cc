"""Encoders side by side."""

from __future__ import annotations

import torch

from transformers_models.shared_parts import (
    IMAGE,
    ROWS,
    VOCABULARY,
    Recipe,
    entry,
    reader,
    seer,
    text_and_image,
    tower,
    words,
)


@entry("CLIPModel")
def clip_model() -> Recipe:
    return {"text_config": reader(), "vision_config": seer(), "projection_dim": 16}, text_and_image()


@entry("SiglipModel")
def siglip_model() -> Recipe:
    return {"text_config": reader(), "vision_config": seer()}, text_and_image()


@entry("Siglip2Model")
def siglip2_model() -> Recipe:
    vision = tower(num_patches=16, patch_size=4, num_channels=3)
    shapes = torch.tensor([[4, 4]] * ROWS)
    image = {"pixel_values": torch.randn(ROWS, 16, 48), "spatial_shapes": shapes}
    image["pixel_attention_mask"] = torch.ones(ROWS, 16, dtype=torch.long)
    return {"text_config": reader(), "vision_config": vision}, {"input_ids": words(), **image}


@entry("AltCLIPModel")
def alt_clip_model() -> Recipe:
    text = reader(project_dim=32, type_vocab_size=1)
    return {"text_config": text, "vision_config": seer(), "projection_dim": 16}, text_and_image()


@entry("ChineseCLIPModel")
def chinese_clip_model() -> Recipe:
    return {"text_config": reader(), "vision_config": seer(), "projection_dim": 16}, text_and_image()


@entry("CLIPSegForImageSegmentation")
def clip_seg_for_image_segmentation() -> Recipe:
    settings = {"text_config": reader(), "vision_config": seer(), "projection_dim": 16, "reduce_dim": 8}
    return {
        **settings,
        "extract_layers": [1, 2, 3],
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 16,
    }, text_and_image()


@entry("ClapModel")
def clap_model() -> Recipe:
    audio = {
        "window_size": 4,
        "num_mel_bins": 16,
        "spec_size": 64,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "hidden_size": 64,
        "patch_embeds_hidden_size": 16,
        "projection_dim": 16,
        "depths": [2, 2, 2],
        "num_attention_heads": [2, 2, 2],
        "num_hidden_layers": 3,
    }
    settings = {"text_config": reader(projection_dim=16, type_vocab_size=1), "audio_config": audio}
    return {**settings, "projection_dim": 16}, {
        "input_ids": words(),
        "input_features": torch.randn(ROWS, 1, 64, 16),
        "is_longer": torch.zeros(ROWS, 1, dtype=torch.bool),
    }


@entry("AlignModel")
def align_model() -> Recipe:
    vision = {
        "image_size": 32,
        "hidden_dim": 32,
        "num_channels": 3,
        "kernel_sizes": [3, 3],
        "in_channels": [32, 16],
        "out_channels": [16, 32],
        "strides": [1, 2],
        "num_block_repeats": [1, 2],
        "expand_ratios": [1, 6],
        "depthwise_padding": [],
        "squeeze_expansion_ratio": 0.25,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "depth_divisor": 8,
    }
    return {"text_config": reader(), "vision_config": vision, "projection_dim": 32}, text_and_image(32)


@entry("FlavaModel")
def flava_model() -> Recipe:
    parts = {"text_config": reader(), "image_config": seer(), "multimodal_config": tower()}
    return {**parts, "projection_dim": 16, "hidden_size": 32}, text_and_image()


@entry("XCLIPModel")
def xclip_model() -> Recipe:
    vision = seer(
        mit_hidden_size=32, mit_intermediate_size=64, mit_num_hidden_layers=1, mit_num_attention_heads=2, num_frames=2
    )
    settings = {
        "text_config": reader(),
        "vision_config": vision,
        "projection_dim": 32,
        "prompt_num_attention_heads": 2,
        "prompt_layers": 1,
    }
    return settings, {"input_ids": words(), "pixel_values": torch.randn(ROWS, 2, 3, IMAGE, IMAGE)}


@entry("OwlViTForObjectDetection")
def owl_vi_t_for_object_detection() -> Recipe:
    return {"text_config": reader(), "vision_config": seer(), "projection_dim": 32}, text_and_image()


@entry("GroupViTModel")
def group_vi_t_model() -> Recipe:
    vision = {
        "image_size": 16,
        "patch_size": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "depths": [2, 2],
        "num_group_tokens": [4, 0],
        "num_output_groups": [2, 2],
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
    }
    settings = {"text_config": reader(), "vision_config": vision, "projection_dim": 16}
    return {**settings, "projection_intermediate_dim": 16}, text_and_image()


@entry("VisionTextDualEncoderModel")
def vision_text_dual_encoder_model() -> Recipe:
    from transformers import BertConfig, VisionTextDualEncoderConfig, ViTConfig

    made = VisionTextDualEncoderConfig.from_vision_text_configs(
        ViTConfig(**seer()), BertConfig(**reader()), projection_dim=16
    )
    return made, text_and_image()


@entry("BridgeTowerModel")
def bridge_tower_model() -> Recipe:
    vision = {**tower(image_size=16, patch_size=8), "hidden_size": 64}
    text = reader(type_vocab_size=1)
    settings = {
        "text_config": text,
        "vision_config": vision,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return settings, {**text_and_image(), "pixel_mask": torch.ones(ROWS, 16, 16, dtype=torch.long)}


@entry("LxmertModel")
def lxmert_model() -> Recipe:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "l_layers": 4,
        "r_layers": 3,
        "x_layers": 2,
        "visual_feat_dim": 24,
    }
    seen = {"visual_feats": torch.randn(ROWS, 6, 24), "visual_pos": torch.rand(ROWS, 6, 4)}
    return settings, {"input_ids": words(), **seen}
