"""Towers beside each other: images or sounds and text."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

from bench.sweep.models.pieces import SIZES, TEXT, VISION, Made, images, real, words


def _pair(drawn):
    return {"input_ids": words(drawn), "pixel_values": images(drawn), "return_loss": True}


def clip() -> Made:
    return tf.CLIPModel(
        tf.CLIPConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=16)
    ), _pair


def siglip() -> Made:
    return tf.SiglipModel(tf.SiglipConfig(text_config=TEXT, vision_config=VISION)), _pair


def siglip2() -> Made:
    vision = {**SIZES, "patch_size": 8, "num_patches": 16}
    return tf.Siglip2Model(tf.Siglip2Config(text_config=TEXT, vision_config=vision)), lambda drawn: {
        "input_ids": words(drawn),
        "pixel_values": real(drawn, 4, 16, 3 * 8 * 8),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8], [3, 5], [4, 4]]),
        "pixel_attention_mask": torch.arange(16).expand(4, 16) < torch.tensor([[16], [16], [15], [16]]),
        "return_loss": True,
    }


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


def visual_bert() -> Made:
    return tf.VisualBertModel(tf.VisualBertConfig(**TEXT, visual_embedding_dim=16)), lambda drawn: {
        "input_ids": words(drawn),
        "visual_embeds": real(drawn, 4, 6, 16),
    }


def lxmert() -> Made:
    config = tf.LxmertConfig(**TEXT, l_layers=2, x_layers=1, r_layers=1, visual_feat_dim=16)
    return tf.LxmertModel(config), lambda drawn: {
        "input_ids": words(drawn),
        "visual_feats": real(drawn, 4, 6, 16),
        "visual_pos": real(drawn, 4, 6, 4),
    }


def clip_with_all_hidden_states() -> Made:
    model, draw = clip()
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
