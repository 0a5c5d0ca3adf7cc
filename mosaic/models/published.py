"""Published models of transformers with random weights: CLIP, LLaVA and Qwen3-VL."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from mosaic.errors import MosaicError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mosaic.models.multimodal import Draw

_CLASSES = {
    "clip": ("CLIPConfig", "CLIPModel"),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration"),
    "qwen3-vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
}
_CLIP_L: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "projection_dim": 768,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """A model of transformers in its published size, or a tiny one."""

    kind: Literal["clip", "llava", "qwen3-vl"]
    """Name in the zoo."""
    is_tiny: bool = False
    """True for test models."""

    def make(self) -> nn.Module:
        """Returns the model.

        Raises:
            MosaicError: transformers is not installed, or the model cannot be created without data.
        """
        if self.kind != "clip" and torch.empty(0).device.type == "meta":
            raise MosaicError(
                f"transformers' {self.kind} reads the values of its inputs, so its operators cannot be counted; "
                "plan qwen3-vl-paper, or profile this model on a GPU"
            )
        config, model = (self._class(name) for name in _CLASSES[self.kind])
        plain: nn.Module = model(config(**self._options()))
        return plain.train()

    def sample(self, draw: Draw, tasks: Sequence[str] | None = None) -> dict[str, Any]:
        """Draws a batch: an image and a text per row.

        Raises:
            ValueError: ``tasks`` are passed; the published models have one.
        """
        if tasks:
            raise ValueError(f"unknown task {tasks[0]!r}; {self.kind} has only one task")
        if self.kind == "clip":
            ids = draw.ids(77, 0, 49_406)
            ids[:, -1] = 49_407  # end of text
            return {"input_ids": ids, "pixel_values": draw.normal(3, 224, 224), "return_loss": True}
        if self.kind == "llava":
            px, patches = (28, 4) if self.is_tiny else (336, 576)
            ids = draw.ids(patches + 8, 0, 60)
            ids[:, 1 : 1 + patches] = 63 if self.is_tiny else 32_000
            return {"input_ids": ids, "labels": ids.clone(), "pixel_values": draw.normal(3, px, px)}
        ids = draw.ids(2048, 0, 151_000)
        ids[:, 1:257] = 151_655
        grid = torch.tensor([[1, 32, 32]], device=draw.device).expand(draw.batch, -1)
        pixels = draw.normal(1024, 3 * 2 * 16 * 16).flatten(0, 1)
        kinds = (ids == 151_655).int()
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "pixel_values": pixels,
            "image_grid_thw": grid,
            "mm_token_type_ids": kinds,
        }

    def _options(self) -> dict[str, Any]:
        if self.kind == "clip":
            vision = {**_CLIP_L, "patch_size": 14, "image_size": 224}
            text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
            return {"vision_config": vision, "text_config": {**text, "projection_dim": 768}, "projection_dim": 768}
        if self.kind == "qwen3-vl":  # the 8B model, unlike the class's defaults
            text = {
                "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128,
            }  # fmt: skip
            return {"text_config": text, "vision_config": {"out_hidden_size": 4096}}
        if self.is_tiny:
            small = {key: value for key, value in _TINY.items() if key != "projection_dim"}
            return {
                "vision_config": {**_TINY, "model_type": "clip_vision_model", "patch_size": 14, "image_size": 28},
                "text_config": {**small, "model_type": "llama", "vocab_size": 64},
                "image_token_index": 63,
            }
        return {"vision_config": {**_CLIP_L, "model_type": "clip_vision_model", "patch_size": 14, "image_size": 336}}

    def _class(self, name: str) -> Any:
        try:
            return getattr(importlib.import_module("transformers"), name)
        except ImportError as missing:
            raise MosaicError(
                f"zoo:{self.kind} in this size needs transformers, which is not installed; "
                "pip install 'mosaic-colocate[transformers]', or use another size"
            ) from missing
