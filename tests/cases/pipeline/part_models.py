"""Tiny models of the classes that people train, each with a microbatch and cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import glued_models
import torch
import transformers
from glued_models import TEXT, VISION, VOCABULARY, WIDTH
from torch import nn

from mosaic.graph import Part

IMAGE = 7
"""Token in whose place an image's features go."""

_SMALL = {**TEXT, "use_cache": False}
_VISION = {**VISION, "hidden_size": WIDTH, "intermediate_size": 24}


@dataclass(frozen=True, kw_only=True)
class PartedCase:
    """A model, a microbatch, and ways to cut it."""

    make: Callable[[], nn.Module]
    """Makes the model."""
    batch: Callable[[], dict[str, Any]]
    """Makes a microbatch; random numbers are seeded."""
    cuts: tuple[tuple[str, ...], ...]
    """Each a partition, as ``chunks_of`` reads it."""
    feeds: tuple[tuple[str, str], ...] = ()
    """The edges between modules that the tracer finds."""
    loss: Callable[[Any], torch.Tensor] = field(default=lambda output: output.loss)
    """Of the model's output."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Pieces into which modules are cut, for partitions without mixed chunks."""


def chunks_of(*texts: str) -> list[tuple[Part, ...]]:
    """Reads chunks such as ``vision[1:2/2]+text[0:1/3]``."""
    return [tuple(Part.parse(part) for part in text.split("+")) for text in texts]


def tokens(rows: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(8, VOCABULARY, (rows, length))


def text_batch() -> dict[str, Any]:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def decoder(config: type, model: type, **more: Any) -> PartedCase:
    return PartedCase(
        make=lambda: model(config(**{**_SMALL, **more})),
        batch=text_batch,
        cuts=(
            ("model[0:3/3]",),
            ("model[0:1/3]", "model[1:2/3]", "model[2:3/3]"),
        ),
    )


DECODERS = {
    "llama": decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "llama, tied": decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM, tie_word_embeddings=True),
    "llama, dropout": decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM, attention_dropout=0.3),
}


class OwnEncoder(nn.Module):
    """A model around torch's own encoder layers, with a parameter of its own beside them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=dropout, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        device = next(self.encoder.parameters()).device
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=device)
        hidden = nn.functional.dropout(self.embed(ids) * self.scale, 0.2, training=self.training)
        return self.head(self.encoder(hidden, mask=mask).mean(1))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 12),
        nn.Tanh(),
        nn.Sequential(nn.Linear(12, 12), nn.GELU()),
        nn.Linear(12, 2),
    )


def square_sum(output: Any) -> torch.Tensor:
    found = output if isinstance(output, torch.Tensor) else output[0]
    return found.square().sum()


ENCODERS = {
    "torch's encoder": PartedCase(
        make=lambda: OwnEncoder(0.2),
        batch=lambda: {"ids": tokens()},
        cuts=(("encoder[0:4/4]",), ("encoder[0:1/4]", "encoder[1:3/4]", "encoder[3:4/4]")),
        loss=square_sum,
    ),
    "sequential": PartedCase(
        make=sequential,
        batch=lambda: {"input": torch.randn(5, 4)},
        cuts=(("model[0:3/6]", "model[3:6/6]"), ("model[0:1/6]", "model[1:5/6]", "model[5:6/6]")),
        loss=square_sum,
    ),
}


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=4,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=6,
            max_target_positions=8,
            dropout=0.1,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def llava() -> nn.Module:
    vision, text = transformers.CLIPVisionConfig(**_VISION), transformers.LlamaConfig(**_SMALL)
    return glued_models.llava(vision, text, vision_feature_layer=-2)


def llava_batch() -> dict[str, Any]:
    ids = tokens(2, 12)
    ids.flatten()[1:13] = IMAGE  # three images of four tokens
    return {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(3, 3, 8, 8)}


def qwen3_vl() -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    config = transformers.Qwen3VLConfig(
        text_config={**_SMALL, "num_hidden_layers": 4, "rope_parameters": rope},
        vision_config={
            "depth": 4,
            "hidden_size": WIDTH,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=IMAGE,
        vision_start_token_id=5,
        vision_end_token_id=6,
        video_token_id=4,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_batch() -> dict[str, Any]:
    ids = tokens(2, 10)
    ids[0, 1:5] = IMAGE
    ids[0, 6:8] = IMAGE
    ids[1, 2:6] = IMAGE
    grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 4]])
    kinds = (ids == IMAGE).int()
    return {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(40, 3 * 16),
        "image_grid_thw": grid,
    }


SEVERAL_MODULES = {
    "whisper": PartedCase(
        make=whisper,
        batch=lambda: {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": tokens(), "labels": tokens()},
        cuts=(
            ("encoder[0:2/2]", "decoder[0:3/3]"),
            ("encoder[0:1/2]", "encoder[1:2/2]", "decoder[0:1/3]", "decoder[1:2/3]", "decoder[2:3/3]"),
            ("encoder[0:1/2]", "encoder[1:2/2]+decoder[0:2/3]", "decoder[2:3/3]"),
        ),
        feeds=(("encoder", "decoder"),),
    ),
    "llava": PartedCase(
        make=llava,
        batch=llava_batch,
        cuts=(
            ("vision_tower[0:3/3]", "language_model[0:3/3]"),
            ("vision_tower[0:2/3]", "vision_tower[2:3/3]", "language_model[0:1/3]", "language_model[1:3/3]"),
            ("vision_tower[0:1/3]", "vision_tower[1:3/3]+language_model[0:1/3]", "language_model[1:3/3]"),
        ),
        feeds=(("vision_tower", "language_model"),),
        sizes={"vision_tower": 2},
    ),
    "qwen3-vl": PartedCase(
        make=qwen3_vl,
        batch=qwen3_vl_batch,
        cuts=(
            ("visual[0:4/4]", "language_model[0:4/4]"),
            ("visual[0:2/4]", "visual[2:4/4]", *(f"language_model[{i}:{i + 1}/4]" for i in range(4))),
            ("visual[0:2/4]", "visual[2:4/4]+language_model[0:1/4]", "language_model[1:4/4]"),
        ),
        feeds=(("visual", "language_model"),),
        sizes={"visual": 2},
    ),
    "glued": PartedCase(
        make=glued_models.glued,
        batch=glued_models.batch,
        cuts=(
            ("vision[0:3/3]", "audio[0:2/2]", "language_model[0:3/3]"),
            (
                "vision[0:2/3]",
                "vision[2:3/3]",
                "audio[0:1/2]",
                "audio[1:2/2]",
                "language_model[0:1/3]",
                "language_model[1:3/3]",
            ),
            ("vision[0:1/3]+audio[0:2/2]", "vision[1:3/3]+language_model[0:1/3]", "language_model[1:3/3]"),
        ),
        feeds=(("vision", "language_model"), ("audio", "language_model")),
        sizes={"vision": 2},
    ),
}
