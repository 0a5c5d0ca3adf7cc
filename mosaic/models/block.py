"""The transformer block that all of the zoo is made of; what differs between models is data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.layers.attention import Angles, Attention, RMSNorm

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu, "silu": F.silu}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions and kind of a stack of blocks; by default a vision transformer's."""

    layers: int
    """Blocks."""
    width: int
    """Features of a token."""
    heads: int
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads; as many as ``heads`` by default."""
    head_width: int | None = None
    """Features of a head; ``width / heads`` by default."""
    mlp: int | None = None
    """Features inside the perceptron; four times the width by default."""
    norm: Literal["layer", "rms"] = "layer"
    """Norm before each part."""
    eps: float = 1e-5
    """Added to the norms' variance."""
    activation: Activation = "gelu"
    """Inside the perceptron."""
    gated: bool = False
    """Whether a second projection gates the perceptron (SwiGLU)."""
    bias: bool = True
    """Whether linear layers have biases."""
    qkv_bias: bool | None = None
    """Whether queries, keys and values have them; as ``bias`` by default."""
    qk_norm: bool = False
    """Whether queries and keys are normed a head."""
    bias_kv: bool = False
    """Whether attention has a learned key and value more (ImageBind)."""
    inner_norms: bool = False
    """Whether attention's result and the perceptron's inside are normed as well (OFA's scaled blocks)."""
    drop_path: float = 0.0
    """Probability that training skips the last block's parts for a sample; grows linearly from 0 at the first."""

    def make_norm(self, width: int | None = None) -> nn.Module:
        """Returns a norm of this kind."""
        kind = nn.LayerNorm if self.norm == "layer" else RMSNorm
        return kind(width or self.width, eps=self.eps)

    def tiny(self, layers: int = 2, width: int = 32) -> Shape:
        """Returns the same kind of stack, small; heads are four, or two groups of two where they are grouped."""
        return replace(
            self,
            layers=min(layers, self.layers),
            width=width,
            heads=4,
            kv_heads=None if self.kv_heads is None else 2,
            head_width=None if self.head_width is None else width // 4,
            mlp=2 * width,
        )


class DropPath(nn.Module):
    """Skips a residual branch for some samples of a batch while training (Huang et al. 2016)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, ...); what is kept is scaled up, so that the mean stays."""
        if not self.training or self.probability == 0.0:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.probability)
        return x * kept / (1 - self.probability)


class Perceptron(nn.Module):
    """Two linear layers with an activation between; gated, the first is twice as wide and half of it a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inside = shape.mlp or 4 * shape.width
        self.activation, self.gated = shape.activation, shape.gated
        self.up = nn.Linear(shape.width, 2 * inside if shape.gated else inside, bias=shape.bias)
        self.norm = shape.make_norm(inside) if shape.inner_norms else nn.Identity()
        self.down = nn.Linear(inside, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (..., width)."""
        hidden = self.up(x)
        activation = _ACTIVATIONS[self.activation]
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = activation(gate) * hidden
        else:
            hidden = activation(hidden)
        found: Tensor = self.down(self.norm(hidden))
        return found


class Block(nn.Module):
    """Attention, cross-attention where asked for, and a perceptron, each after a norm and added to what came in."""

    def __init__(self, shape: Shape, *, context_width: int | None = None, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = shape.make_norm()
        self.attention = _attention(shape, None)
        self.after_attention = shape.make_norm() if shape.inner_norms else nn.Identity()
        self.crosses = context_width is not None
        if self.crosses:
            self.cross_norm = shape.make_norm()
            self.cross_attention = _attention(shape, context_width)
            self.after_cross = shape.make_norm() if shape.inner_norms else nn.Identity()
        self.perceptron_norm = shape.make_norm()
        self.perceptron = Perceptron(shape)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Takes and returns (batch, tokens, width); see ``Attention`` for the rest."""
        mixed = self.attention(self.norm(x), angles=angles, mask=mask, causal=causal)
        x = x + self.drop_path(self.after_attention(mixed))
        if self.crosses:
            looked = self.cross_attention(self.cross_norm(x), context, mask=context_mask)
            x = x + self.drop_path(self.after_cross(looked))
        found: Tensor = x + self.drop_path(self.perceptron(self.perceptron_norm(x)))
        return found


class Stack(nn.Module):
    """Blocks one after the other, and a norm at the end where asked for."""

    def __init__(self, shape: Shape, *, context_width: int | None = None, last_norm: bool = True) -> None:
        super().__init__()
        steps = max(1, shape.layers - 1)
        self.blocks = nn.ModuleList(
            Block(shape, context_width=context_width, drop_path=shape.drop_path * index / steps)
            for index in range(shape.layers)
        )
        self.norm = shape.make_norm() if last_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Takes and returns (batch, tokens, width); see ``Attention`` for the rest."""
        for block in self.blocks:
            x = block(x, context, angles=angles, mask=mask, context_mask=context_mask, causal=causal)
        found: Tensor = self.norm(x)
        return found


def _attention(shape: Shape, context_width: int | None) -> Attention:
    return Attention(
        shape.width,
        shape.heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        bias=shape.bias if shape.qkv_bias is None else shape.qkv_bias,
        out_bias=shape.bias,
        qk_norm=shape.qk_norm,
        bias_kv=shape.bias_kv and context_width is None,
        context_width=context_width,
    )
