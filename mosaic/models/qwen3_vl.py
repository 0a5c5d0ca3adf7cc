"""Qwen3-VL: a vision tower whose tokens are merged into the text of a language model (Bai et al. 2025).

``public`` is Qwen3-VL-8B: 8,767,123,696 parameters, as its checkpoint has. The paper's Table 1 gives it 8.1 B, which is
the language model with its embedding and head alone (8.191 B), and vision of 27 x 4096: 27 layers are right, 1152 is
their width, and 4096 is the width that they are projected to, which ``out_width`` is here. Its text encoder of 1 x 4096
is the embedding. So ``paper`` has the published dimensions, on Table 2's inputs: 2,048 tokens of which 256 are an image
of 512 x 512. DeepStack's features are added after the language model's first blocks.

Language model over vision, ``paper`` does 28 times the operations, Table 1 8.6 times: its 22.27 TFLOPs are those of 512
tokens, a quarter of Table 2's text. ``table1`` has its ratio (8.7) by texts of 656 tokens, 256 of them the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.attention import grid_positions
from mosaic.models.layers.block import Shape
from mosaic.models.layers.language_model import LanguageConfig, LanguageModel, language_shape, merge
from mosaic.models.layers.qwen3_vision import FRAMES, MERGE, VisionConfig, VisionTower
from mosaic.models.layers.targets import next_token_loss
from mosaic.models.layers.towers import embedding
from mosaic.models.zoo_model import ZooModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig:
    """Dimensions of a Qwen3-VL."""

    vision: VisionConfig
    """Vision tower."""
    language: LanguageConfig
    """Language model."""
    inputs: InputSizes
    """Sizes of samples; a text's tokens include the image's."""
    image_id: int
    """Id of the placeholders of an image."""
    video_id: int
    """Id of the placeholders of a video."""


_8B = Qwen3VLConfig(
    vision=VisionConfig(
        shape=Shape(layers=27, width=1152, heads=16, mlp=4304, eps=1e-6, activation="gelu_tanh"),
        patch=16,
        side=48,
        out_width=4096,
        deepstack=(8, 16, 24),
    ),
    language=LanguageConfig(
        shape=language_shape(layers=36, width=4096, heads=32, mlp=12_288, kv_heads=8, head_width=128, qk_norm=True),
        vocabulary=151_936,
        theta=5e6,
        sections=(24, 20, 20),
    ),
    inputs=TABLE_2,
    image_id=151_655,
    video_id=151_656,
)
SIZES: Mapping[str, Qwen3VLConfig] = MappingProxyType(
    {
        "tiny": replace(
            _8B, vision=_8B.vision.tiny(32), language=_8B.language.tiny(), inputs=TINY, image_id=62, video_id=63
        ),
        "public": _8B,
        "paper": _8B,
        "table1": replace(_8B, inputs=replace(TABLE_2, text_tokens=656)),
    }
)


class Qwen3VL(nn.Module):
    """Vision tower, embedding, language model, head.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__()
        self.config = config
        width = config.language.shape.width
        self.visual = VisionTower(config.vision)
        self.embed_tokens = embedding(config.language.vocabulary, width)
        self.language_model = LanguageModel(config.language)
        self.lm_head = nn.Linear(width, config.language.vocabulary, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        image: Tensor | None = None,
        video: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Merges what is seen into the text and predicts the next tokens.

        Args:
            input_ids: (batch, tokens), with one placeholder for each token of an image or a video.
            position_ids: Time, row and column of each token, (batch, tokens, 3); see ``positions_of``.
            labels: Ids to predict, (batch, tokens); -100 where there is nothing to predict.
            image: (batch, 3, height, width).
            video: (batch, 3, frames, height, width); instead of an image.

        Returns:
            ``logits`` (batch, tokens, vocabulary); with labels ``loss`` as well.

        Raises:
            ValueError: Both an image and a video are given.
        """
        if image is not None and video is not None:
            raise ValueError("a batch has images or videos; make two batches of them")
        embedded = self.embed_tokens(input_ids)
        visual, added = None, ()
        seen = image if image is not None else video
        if seen is not None:
            visual = input_ids == (self.config.image_id if image is not None else self.config.video_id)
            features, added = self.visual(seen)
            embedded = merge(embedded, visual, features)
        hidden = self.language_model(embedded, position_ids, visual=visual, added=added)
        found = {"logits": self.lm_head(hidden)}
        if labels is not None:
            found["loss"] = next_token_loss(found["logits"], labels)
        return found


def positions_of(tokens: int, start: int, frames: int, side: int, device: torch.device) -> Tensor:
    """Returns (tokens, 3): a text's positions are equal on all axes, an image's are its time, row and column.

    Args:
        tokens: All tokens.
        start: Tokens of text before the image.
        frames: Tokens of the image along time.
        side: Its tokens along each side; the text goes on after the greatest of its positions.
        device: Where they are made.
    """
    seen = frames * side**2
    before = torch.arange(start, device=device).unsqueeze(1).expand(-1, 3)
    time = torch.arange(frames, device=device).repeat_interleave(side**2).unsqueeze(1)
    image = torch.cat((time, grid_positions(side, side, device).repeat(frames, 1)), dim=1) + start
    after = torch.arange(tokens - start - seen, device=device).unsqueeze(1).expand(-1, 3) + start + max(frames, side)
    return torch.cat((before, image, after))


def make_batch(config: Qwen3VLConfig, draw: Draw, *, video: bool = False) -> dict[str, Tensor]:
    """Draws texts with an image, or a video, after the first token; only text is to be predicted.

    Raises:
        ValueError: The placeholders do not fit into the text.
    """
    sizes, vision = config.inputs, config.vision
    frames = sizes.video_frames // FRAMES if video else 1
    px = sizes.video_px if video else sizes.image_px
    side, count = px // vision.patch // MERGE, frames * vision.tokens(px)
    tokens = sizes.text_tokens
    if count + 2 > tokens:
        raise ValueError(
            f"{count} tokens of what is seen do not fit into text_tokens={tokens}; use a longer text or smaller frames"
        )
    ids = draw.text(min(config.image_id, config.video_id))
    ids[:, 1 : 1 + count] = config.video_id if video else config.image_id
    labels = ids.clone()
    labels[:, 1 : 1 + count] = -100
    positions = positions_of(tokens, 1, frames, side, draw.device).expand(draw.batch, -1, -1).contiguous()
    seen = {"video": draw.video()} if video else {"image": draw.image()}
    return {"input_ids": ids, "position_ids": positions, "labels": labels, **seen}


MODEL = ZooModel(
    name="qwen3-vl",
    make=Qwen3VL,
    sample=make_batch,
    sizes=SIZES,
    source="Bai et al. 2025",
    workload="mosaic",
    encoders=("visual",),
    backbone=("language_model",),
)
