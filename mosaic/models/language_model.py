"""Decoder-only language models after LLaMA and Qwen, over embeddings that other modalities were merged into."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mosaic.models.layers.attention import Rotary, line_positions
from mosaic.models.layers.block import Shape, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageConfig:
    """Dimensions of a language model."""

    shape: Shape
    """Of its blocks; see ``language_shape``."""
    vocabulary: int
    """Ids of its text."""
    theta: float = 10_000.0
    """Base of the rotary frequencies."""
    sections: tuple[int, int, int] | None = None
    """Frequencies of time, height and width, for positions on three axes (Qwen3-VL); None for one axis."""

    def tiny(self) -> LanguageConfig:
        """Returns the same kind of model, small."""
        shape = self.shape.tiny()
        return replace(self, shape=shape, vocabulary=64, sections=None if self.sections is None else (2, 1, 1))


def language_shape(*, layers: int, width: int, heads: int, mlp: int, **more: int | bool | None) -> Shape:
    """Returns blocks as LLaMA has them: RMS norms, a gated perceptron, no biases; ``more`` changes fields of it."""
    made = Shape(
        layers=layers,
        width=width,
        heads=heads,
        mlp=mlp,
        norm="rms",
        eps=1e-6,
        activation="silu",
        gated=True,
        bias=False,
    )
    return replace(made, **more)  # type: ignore[arg-type]  # each field checks itself where it is used


TINY_LLAMA = LanguageConfig(
    shape=language_shape(layers=22, width=2048, heads=32, mlp=5632, kv_heads=4), vocabulary=32_000
)
"""TinyLlama-1.1B (Zhang et al. 2024): 1,100,048,384 parameters with its head."""
LLAMA_2_7B = LanguageConfig(shape=language_shape(layers=32, width=4096, heads=32, mlp=11_008), vocabulary=32_000)
"""LLaMA-2 7B (Touvron et al. 2023): 6,738,415,616 parameters with its head."""


class LanguageModel(nn.Module):
    """Blocks that look back, over embedded tokens; embedding and head are modules of their own, beside it."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        shape = config.shape
        width = shape.head_width or shape.width // shape.heads
        self.rotary = Rotary(width, config.theta, config.sections or "line")
        self.stack = Stack(shape)

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor | None = None,
        *,
        visual: Tensor | None = None,
        added: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Runs the blocks.

        Args:
            embedded: (batch, tokens, width).
            positions: (batch, tokens, axes); by default one after the other, for models with one axis.
            visual: Which tokens are an image's, (batch, tokens) of bool.
            added: What is added to these tokens after the first blocks, one tensor of (visual tokens, width) a block,
                in the order of the tokens (Qwen3-VL's DeepStack).

        Returns:
            (batch, tokens, width), normed.
        """
        if positions is None:
            positions = line_positions(embedded.shape[1], embedded.device)
        angles = self.rotary(positions)
        for index, block in enumerate(self.stack.blocks):
            embedded = block(embedded, angles=angles, causal=True)
            if index < len(added) and visual is not None:
                seen = spread(added[index], visual).to(embedded.dtype)
                embedded = torch.where(visual.unsqueeze(-1), embedded + seen, embedded)
        found: Tensor = self.stack.norm(embedded)
        return found


def merge(embedded: Tensor, where: Tensor, features: Tensor) -> Tensor:
    """Puts another modality's features into the token stream.

    Args:
        embedded: (batch, tokens, width).
        where: Which tokens are placeholders, (batch, tokens) of bool; as many as there are features.
        features: (..., width), in the order of the placeholders.
    """
    return torch.where(where.unsqueeze(-1), spread(features, where).to(embedded.dtype), embedded)


def spread(features: Tensor, where: Tensor) -> Tensor:
    """Returns features at their placeholders, (batch, tokens, width); elsewhere stands what does not count.

    ``masked_scatter`` does the same, but its backward has to ask the device how many placeholders there are: a step
    with it waits there, and can be no CUDA graph.
    """
    index = (where.flatten().cumsum(0) - 1).clamp(min=0)
    found: Tensor = features.flatten(0, -2).index_select(0, index).unflatten(0, where.shape)
    return found
