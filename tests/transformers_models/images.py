"""Images to words, boxes and labels."""

from __future__ import annotations

import torch

from transformers_models.shared_parts import (
    IMAGE,
    MARK,
    PATCH,
    ROWS,
    VOCABULARY,
    WORDS,
    Recipe,
    entry,
    pixels,
    reader,
    seen,
    seer,
    sequences,
    taught,
    text_and_image,
    words,
)


@entry("Florence2ForConditionalGeneration")
def florence2_for_conditional_generation() -> Recipe:
    vision = {
        "in_channels": 3,
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "window_size": 2,
        "projection_dim": 32,
    }
    text = {"model_type": "bart", **sequences()}
    settings = {"vision_config": vision, "text_config": text, "image_token_id": MARK, "is_encoder_decoder": True}
    return settings, seen(5, pixel_values=pixels())


@entry("GitForCausalLM")
def git_for_causal_lm() -> Recipe:
    settings = {**reader(use_cache=False), "vision_config": seer()}
    return settings, {**taught(text_and_image())}


@entry("ViltForMaskedLM")
def vilt_for_masked_lm() -> Recipe:
    return {**reader(), "image_size": IMAGE, "patch_size": PATCH}, taught(text_and_image())


@entry("VisualBertModel")
def visual_bert_model() -> Recipe:
    batch = {"input_ids": words(), "visual_embeds": torch.randn(ROWS, 4, 24)}
    return {**reader(), "visual_embedding_dim": 24}, batch


@entry("Pix2StructForConditionalGeneration")
def pix2_struct_for_conditional_generation() -> Recipe:
    vision = {
        "hidden_size": 32,
        "patch_embed_hidden_size": 12,
        "d_ff": 64,
        "d_kv": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "seq_len": 8,
    }
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 4,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
    flat = torch.cat([torch.arange(8.0).repeat(2, 1).T.expand(ROWS, 8, 2), torch.randn(ROWS, 8, 12)], -1)
    return {"vision_config": vision, "text_config": text}, {"flattened_patches": flat, "labels": words()}


@entry("VisionEncoderDecoderModel")
def vision_encoder_decoder_model() -> Recipe:  # Donut
    from transformers import DonutSwinConfig, MBartConfig, VisionEncoderDecoderConfig

    encoder = DonutSwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
    decoder = MBartConfig(**sequences(is_decoder=True, add_cross_attention=True, use_cache=False))
    made = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    made.decoder_start_token_id, made.pad_token_id = 2, 0
    return made, {"pixel_values": pixels(32), "labels": words()}


@entry("DetrForObjectDetection")
def detr_for_object_detection() -> Recipe:
    from transformers import DetrConfig, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], out_features=["stage2"], layer_type="basic"
    )
    settings = DetrConfig(
        **sequences(num_queries=4),
        backbone_config=backbone,
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
    )
    return settings, {"pixel_values": pixels(32)}


@entry("GroundingDinoForObjectDetection")
def grounding_dino_for_object_detection() -> Recipe:
    from transformers import BertConfig, GroundingDinoConfig, SwinConfig

    backbone = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=32,
        depths=[1, 1, 4],
        num_heads=[1, 2, 2],
        window_size=4,
        out_features=["stage2", "stage3"],
    )
    settings = GroundingDinoConfig(
        **sequences(
            num_queries=4,
            num_feature_levels=2,
            encoder_n_points=2,
            decoder_n_points=2,
        ),
        backbone_config=backbone,
        text_config=BertConfig(**reader()),
        max_text_len=16,
    )
    return settings, {
        "pixel_values": pixels(64),
        "input_ids": words(),
        "attention_mask": torch.ones(ROWS, WORDS, dtype=torch.long),
    }


@entry("PerceiverForImageClassificationLearned")
def perceiver_for_image_classification_learned() -> Recipe:
    settings = {
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 4,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "image_size": IMAGE,
        "num_labels": 3,
    }
    return settings, {"inputs": pixels()}
