"""A fixed number of tokens out of many: learned latents that look at another modality's tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mosaic.models.layers.attention import Attention
from mosaic.models.layers.block import Perceptron, Shape


class Resampler(nn.Module):
    """Latents that cross-attend to a context (Perceiver, Jaegle et al. 2021).

    Args:
        latents: Tokens of the result.
        shape: Of the layers; without ``perceptron`` only attention is made of it.
        context_width: Features of the context's tokens.
        out_width: Features that the result is projected to, without a bias.
        perceptron: Whether layers have a perceptron (Unified-IO 2) or attention only (Qwen-VL's adapter).
    """

    def __init__(
        self, latents: int, shape: Shape, context_width: int, out_width: int, *, perceptron: bool = True
    ) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(latents, shape.width))
        self.enter = nn.Linear(context_width, shape.width, bias=False)
        self.context_norm = shape.make_norm()
        self.norms = nn.ModuleList(shape.make_norm() for _ in range(shape.layers))
        self.attentions = nn.ModuleList(
            Attention(shape.width, shape.heads, bias=shape.bias, out_bias=shape.bias, context_width=shape.width)
            for _ in range(shape.layers)
        )
        self.perceptrons = nn.ModuleList(
            nn.Sequential(shape.make_norm(), Perceptron(shape)) if perceptron else nn.Identity()
            for _ in range(shape.layers)
        )
        self.has_perceptrons = perceptron
        self.norm = shape.make_norm()
        self.project = nn.Linear(shape.width, out_width, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        """Takes (batch, tokens, context width); returns (batch, latents, out width)."""
        context = self.context_norm(self.enter(context))
        x = self.latents.expand(len(context), -1, -1)
        for norm, attention, perceptron in zip(self.norms, self.attentions, self.perceptrons, strict=True):
            x = x + attention(norm(x), context)
            if self.has_perceptrons:
                x = x + perceptron(x)
        found: Tensor = self.project(self.norm(x))
        return found
