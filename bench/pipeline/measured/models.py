"""Hugging Face models with parts of 5 to 50 ms on one core, and ragged steps for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

Microbatch = dict[str, Any]
"""Keyword arguments of a model."""
VOCABULARY = 1024
IMAGE = VOCABULARY - 1
"""Token in whose place a patch comes."""
TOKENS = 192
"""Of a microbatch, patches included."""
SIDE = 4
"""Patches of an image, each way, as tokens."""
MAX_IMAGES = 6
"""Of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    make: Callable[[int, int], nn.Module]
    """Makes it, of a width and so many layers in each of its modules."""
    pixels: Callable[[int, torch.Generator], Microbatch] | None = None
    """Makes the inputs of so many images; None: the model reads text alone."""
    marks_tokens: bool = False
    """True if it reads which tokens are of images."""

    def model(self, width: int, layers: int) -> nn.Module:
        torch.manual_seed(0)
        return self.make(width, layers)

    def step(self, seed: int, num_microbatches: int) -> list[Microbatch]:
        """Returns a step's microbatches: the same for one seed; one of the first step's has all images."""
        draw = torch.Generator().manual_seed(seed)
        images = [0] * num_microbatches
        if self.pixels is not None:
            images = torch.randint(0, MAX_IMAGES + 1, (num_microbatches,), generator=draw).tolist()
            images[0] = images[0] if seed else MAX_IMAGES
        return [self._microbatch(count, draw) for count in images]

    def _microbatch(self, images: int, draw: torch.Generator) -> Microbatch:
        ids = torch.randint(0, IMAGE - 3, (1, TOKENS), generator=draw)
        for image in range(images):  # with a word between images, which tells them apart
            first = image * (SIDE**2 + 1)
            ids[0, first : first + SIDE**2] = IMAGE
        inputs = {"input_ids": ids, "labels": ids.clone()}
        if self.marks_tokens:
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        return inputs | self.pixels(images, draw) if self.pixels is not None and images else inputs


def _text(width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
    }


def _tower(width: int, layers: int) -> dict[str, Any]:
    return {
        "image_size": 8 * SIDE,
        "patch_size": 8,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }


def _llama(width: int, layers: int) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_text(width, layers)))


def _llava(width: int, layers: int) -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_tower(width, layers)),
        text_config=transformers.LlamaConfig(**_text(width, layers)),
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _qwen3_vl(width: int, layers: int) -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True, "rope_theta": 10000.0}
    config = transformers.Qwen3VLConfig(
        text_config={**_text(width, layers), "head_dim": 64, "rope_parameters": rope},
        vision_config={
            "depth": layers,
            "hidden_size": width // 2,
            "intermediate_size": 2 * width,
            "num_heads": width // 64,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": (2 * SIDE) ** 2,
            "deepstack_visual_indexes": [layers // 2],
        },
        image_token_id=IMAGE,
        vision_start_token_id=IMAGE - 1,
        vision_end_token_id=IMAGE - 2,
        video_token_id=IMAGE - 3,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _llava_pixels(images: int, draw: torch.Generator) -> Microbatch:
    return {"pixel_values": torch.randn(images, 3, 8 * SIDE, 8 * SIDE, generator=draw)}


def _qwen3_vl_pixels(images: int, draw: torch.Generator) -> Microbatch:
    patches = 2 * SIDE  # of an image, each way, four of which become a token
    pixels = torch.randn(images * patches**2, 3 * 8 * 8, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, patches, patches]] * images)}


MODELS = MappingProxyType(
    {
        "llava": MeasuredModel(make=_llava, pixels=_llava_pixels),
        "qwen3-vl": MeasuredModel(make=_qwen3_vl, pixels=_qwen3_vl_pixels, marks_tokens=True),
        "llama": MeasuredModel(make=_llama),
    }
)
"""By name."""
