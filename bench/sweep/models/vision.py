"""Models of images and videos: classes, boxes, masks, depth."""

from __future__ import annotations

import torch
import transformers as tf

from bench.sweep.models.pieces import SIZES, TEXT, VISION, Made, images, real, words


def _classified(drawn):
    return {"pixel_values": images(drawn), "labels": torch.tensor([0, 1, 0, 1])}


def _boxes(drawn, rows=2, size=64):
    labels = [
        {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4, generator=drawn) * 0.4 + 0.1}
        for _ in range(rows)
    ]
    return {"pixel_values": images(drawn, rows, size), "labels": labels}


_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 6,
    "num_labels": 3,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}
_SWIN = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 2,
    "patch_size": 2,
}


def vit() -> Made:
    return tf.ViTForImageClassification(tf.ViTConfig(**VISION)), _classified


def dinov2() -> Made:
    return tf.Dinov2ForImageClassification(tf.Dinov2Config(**VISION, drop_path_rate=0.3)), _classified


def beit() -> Made:
    config = tf.BeitConfig(**VISION, drop_path_rate=0.3, use_mask_token=True, vocab_size=99)
    return tf.BeitForMaskedImageModeling(config), lambda drawn: {
        "pixel_values": images(drawn),
        "bool_masked_pos": torch.rand(4, 16, generator=drawn) > 0.5,
    }


def vit_mae() -> Made:
    config = tf.ViTMAEConfig(
        **VISION,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    )
    return tf.ViTMAEForPreTraining(config), lambda drawn: {"pixel_values": images(drawn)}


def swin() -> Made:
    return tf.SwinForImageClassification(tf.SwinConfig(**_SWIN, drop_path_rate=0.3)), lambda drawn: {
        "pixel_values": images(drawn, size=64),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def conv_next() -> Made:
    config = tf.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], drop_path_rate=0.3)
    return tf.ConvNextForImageClassification(config), _classified


def resnet() -> Made:
    return tf.ResNetForImageClassification(tf.ResNetConfig(**_RESNET)), lambda drawn: {
        "pixel_values": images(drawn, size=64),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def mobile_vit() -> Made:
    config = tf.MobileViTConfig(
        image_size=64, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4
    )
    return tf.MobileViTForImageClassification(config), lambda drawn: {
        "pixel_values": images(drawn, size=64),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def video_mae() -> Made:
    config = tf.VideoMAEConfig(
        **VISION, num_frames=4, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    )  # fmt: skip
    hidden = torch.arange(32) % 2 == 0
    return tf.VideoMAEForPreTraining(config), lambda drawn: {
        "pixel_values": real(drawn, 4, 4, 3, 32, 32),
        "bool_masked_pos": hidden.repeat(4, 1),
    }


def vivit() -> Made:
    config = tf.VivitConfig(**SIZES, image_size=32, num_frames=4, tubelet_size=[2, 8, 8])
    return tf.VivitForVideoClassification(config), lambda drawn: {
        "pixel_values": real(drawn, 4, 4, 3, 32, 32),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def detr() -> Made:
    config = tf.DetrConfig(**_DETR, backbone_config=tf.ResNetConfig(**_RESNET, out_features=["stage4"]))
    return tf.DetrForObjectDetection(config), _boxes


def conditional_detr() -> Made:
    config = tf.ConditionalDetrConfig(**_DETR, backbone_config=tf.ResNetConfig(**_RESNET, out_features=["stage4"]))
    return tf.ConditionalDetrForObjectDetection(config), _boxes


def deformable_detr() -> Made:
    backbone = tf.ResNetConfig(**_RESNET, out_features=["stage2", "stage3", "stage4"])
    config = tf.DeformableDetrConfig(
        **_DETR,
        backbone_config=backbone,
        num_feature_levels=3,
        two_stage=True,
        two_stage_num_proposals=6,
        with_box_refine=True,
    )
    return tf.DeformableDetrForObjectDetection(config), _boxes


def rt_detr() -> Made:
    backbone = tf.RTDetrResNetConfig(**_RESNET, out_features=["stage2", "stage3", "stage4"])
    config = tf.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[16, 16, 32], d_model=32, num_queries=6,
        decoder_in_channels=[32, 32, 32], encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4,
        decoder_attention_heads=4, decoder_layers=2, num_denoising=4, num_labels=3, hidden_expansion=0.5,
    )  # fmt: skip
    return tf.RTDetrForObjectDetection(config), _boxes


def yolos() -> Made:
    config = tf.YolosConfig(**{**VISION, "image_size": [64, 64]}, num_detection_tokens=6, num_labels=3)
    return tf.YolosForObjectDetection(config), _boxes


def grounding_dino() -> Made:
    backbone = tf.SwinConfig(**_SWIN, out_features=["stage2", "stage3", "stage4"])
    config = tf.GroundingDinoConfig(
        backbone_config=backbone, text_config=tf.BertConfig(**TEXT), d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=6,
        num_feature_levels=3, max_text_len=16, use_timm_backbone=False, backbone=None,
    )  # fmt: skip
    return tf.GroundingDinoForObjectDetection(config), lambda drawn: {
        "pixel_values": images(drawn, 2, 64),
        "input_ids": words(drawn, 2, 8),
    }


def segformer() -> Made:
    config = tf.SegformerConfig(
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        num_labels=3,
    )
    return tf.SegformerForSemanticSegmentation(config), lambda drawn: {
        "pixel_values": images(drawn, 2, 64),
        "labels": torch.randint(0, 3, (2, 64, 64), generator=drawn),
    }


def _masks(drawn):
    return {
        "pixel_values": images(drawn, 2, 64),
        "mask_labels": [(torch.rand(2, 64, 64, generator=drawn) > 0.5).float() for _ in range(2)],
        "class_labels": [torch.tensor([0, 1]) for _ in range(2)],
    }


def mask_former() -> Made:
    config = tf.MaskFormerConfig(
        backbone_config=tf.SwinConfig(**_SWIN, out_features=["stage1", "stage2", "stage3", "stage4"]),
        decoder_config=tf.DetrConfig(**{**_DETR, "num_labels": 3}),
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=3,
    )
    return tf.MaskFormerForInstanceSegmentation(config), _masks


def mask2former() -> Made:
    config = tf.Mask2FormerConfig(
        backbone_config=tf.SwinConfig(**_SWIN, out_features=["stage1", "stage2", "stage3", "stage4"]),
        feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64, encoder_layers=2,
        decoder_layers=2, num_attention_heads=4, dim_feedforward=64, num_queries=6, train_num_points=64, num_labels=3,
    )  # fmt: skip
    return tf.Mask2FormerForUniversalSegmentation(config), _masks


def upernet() -> Made:
    config = tf.UperNetConfig(
        backbone_config=tf.ConvNextConfig(
            hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
        ),
        hidden_size=16, auxiliary_in_channels=16, auxiliary_channels=16, num_labels=3, use_auxiliary_head=True,
    )  # fmt: skip
    return tf.UperNetForSemanticSegmentation(config), lambda drawn: {
        "pixel_values": images(drawn, 2, 64),
        "labels": torch.randint(0, 3, (2, 64, 64), generator=drawn),
    }


def segment_anything() -> Made:
    config = tf.SamConfig(
        vision_config={**SIZES, "image_size": 64, "patch_size": 16, "output_channels": 32, "window_size": 2,
                       "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 16},
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 16, "image_embedding_size": 4},
        mask_decoder_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64,
                             "iou_head_hidden_dim": 32},
    )  # fmt: skip
    return tf.SamModel(config), lambda drawn: {
        "pixel_values": images(drawn, 2, 64),
        "input_points": torch.rand(2, 1, 2, 2, generator=drawn) * 64,
    }


def dense_prediction() -> Made:
    config = tf.DPTConfig(
        **{**VISION, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16, readout_type="ignore", num_labels=3,
    )  # fmt: skip
    return tf.DPTForSemanticSegmentation(config), lambda drawn: {
        "pixel_values": images(drawn),
        "labels": torch.randint(0, 3, (4, 32, 32), generator=drawn),
    }


def clip_seg() -> Made:
    config = tf.CLIPSegConfig(
        text_config={**TEXT, "eos_token_id": 2}, vision_config={**VISION, "num_hidden_layers": 3}, projection_dim=32,
        reduce_dim=16, extract_layers=[0, 1, 2], decoder_num_attention_heads=4, decoder_intermediate_size=32,
    )  # fmt: skip
    return tf.CLIPSegForImageSegmentation(config), lambda drawn: {
        "input_ids": words(drawn),
        "pixel_values": images(drawn),
        "labels": torch.rand(4, 32, 32, generator=drawn),
    }


def perceiver() -> Made:
    config = tf.PerceiverConfig(
        num_latents=8, d_latents=32, d_model=32, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4,
        num_cross_attention_heads=4, image_size=32, num_labels=3,
    )  # fmt: skip
    return tf.PerceiverForImageClassificationLearned(config), lambda drawn: {
        "inputs": images(drawn),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def vision_encoder_decoder() -> Made:
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tf.ViTConfig(**VISION),
        tf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    return tf.VisionEncoderDecoderModel(config=config), lambda drawn: {
        "pixel_values": images(drawn),
        "labels": words(drawn, length=6),
    }
