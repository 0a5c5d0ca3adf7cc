"""Transformer layers of the model zoo: attention, blocks, stacks, and towers for one modality."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
"""Epsilon of all norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Dimensions of a stack of transformer blocks."""

    layers: int
    """Number of blocks."""
    width: int
    """Width of a token."""
    heads: int
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads; by default ``heads``."""
    head_width: int | None = None
    """Width of a head; by default ``width / heads``."""
    mlp: int | None = None
    """Inner width of the MLP; by default ``4 * width``."""
    llama: bool = False
    """True: LLaMA's blocks (RMS norms, gated MLP, rotary positions, no biases); False: a vision transformer's."""

    def tiny(self) -> Blocks:
        """Returns the same kind of stack with at most two blocks of width 32."""
        small = {"kv_heads": self.kv_heads and 2, "head_width": self.head_width and 8, "mlp": 64}
        return replace(self, layers=min(self.layers, 2), width=32, heads=4, **small)  # type: ignore[arg-type]

    def norm(self) -> nn.Module:
        """Returns a norm over the stack's width."""
        return RMSNorm(self.width, eps=EPS) if self.llama else nn.LayerNorm(self.width, eps=EPS)


class RMSNorm(nn.RMSNorm):
    """An RMS norm in its input's precision, one kernel also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Multi-head self-attention, or cross-attention to a context of width ``context_width``."""

    def __init__(self, shape: Blocks, context_width: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.head_width = shape.head_width or shape.width // shape.heads
        queries, others, bias = self.heads * self.head_width, 2 * self.kv_heads * self.head_width, not shape.llama
        self.crosses = context_width is not None
        if context_width is None:
            self.query_key_value = nn.Linear(shape.width, queries + others, bias=bias)
        else:
            self.query = nn.Linear(shape.width, queries, bias=bias)
            self.key_value = nn.Linear(context_width, others, bias=bias)
        self.out = nn.Linear(queries, shape.width, bias=bias)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, angles: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Returns attention of (batch, tokens, width) to itself or to (batch, context tokens, context width).

        Args:
            x: Query tokens.
            context: Key and value tokens, for cross-attention.
            angles: Rotary angles of each token, (2, tokens, head width): cosines and sines.
            mask: True where a query (row) may see a key (column); an empty tensor is a causal mask.
        """
        if self.crosses:
            assert context is not None
            query = self._by_head(self.query(x))
            key, value = self._by_head(self.key_value(context)).chunk(2, dim=1)
        else:
            counts = (self.heads, self.kv_heads, self.kv_heads)
            query, key, value = self._by_head(self.query_key_value(x)).split(counts, dim=1)
        if angles is not None:
            query, key = (_rotated(part, angles).to(value.dtype) for part in (query, key))
        causal = mask is not None and mask.numel() == 0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=None if causal else mask, is_causal=causal,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_width))
        return heads.transpose(1, 2)


class Perceptron(nn.Module):
    """An MLP of two linear layers; LLaMA's has a gate."""

    def __init__(self, shape: Blocks) -> None:
        super().__init__()
        inside = shape.mlp or 4 * shape.width
        self.gated = shape.llama
        self.up = nn.Linear(shape.width, 2 * inside if self.gated else inside, bias=not self.gated)
        self.down = nn.Linear(inside, shape.width, bias=not self.gated)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden)
        return self.down(hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm block of attention, optional cross-attention, and an MLP, with residuals."""

    def __init__(self, shape: Blocks, context_width: int | None) -> None:
        super().__init__()
        self.attention_norm, self.attention = shape.norm(), Attention(shape)
        self.crosses = context_width is not None
        if self.crosses:
            self.cross_norm, self.cross_attention = shape.norm(), Attention(shape, context_width)
        self.perceptron_norm, self.perceptron = shape.norm(), Perceptron(shape)

    def forward(
        self, x: Tensor, context: Tensor | None, angles: Tensor | None, mask: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles=angles, mask=mask)
        if self.crosses:
            x = x + self.cross_attention(self.cross_norm(x), context, mask=context_mask)
        return x + self.perceptron(self.perceptron_norm(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """A sequence of blocks with a final norm; LLaMA's kind has rotary positions."""

    def __init__(self, shape: Blocks, context_width: int | None = None) -> None:
        super().__init__()
        self.head_width = (shape.head_width or shape.width // shape.heads) if shape.llama else 0
        self.blocks = nn.ModuleList(Block(shape, context_width) for _ in range(shape.layers))
        self.norm = shape.norm() if shape.layers else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Maps (batch, tokens, width) to the same shape; masks as in ``Attention``."""
        if causal:
            mask = x.new_empty(0)
        angles = _angles(x.shape[1], self.head_width, x.device) if self.head_width else None
        for block in self.blocks:
            x = block(x, context, angles, mask, context_mask)
        return self.norm(x)  # type: ignore[no-any-return]


class Resampler(nn.Module):
    """Learned latents that attend to a context: reduces any number of tokens to ``latents``."""

    def __init__(self, latents: int, shape: Blocks, context_width: int, out_width: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(latents, shape.width))
        self.enter = nn.Linear(context_width, shape.width, bias=False)
        self.norms = nn.ModuleList(shape.norm() for _ in range(shape.layers))
        self.attentions = nn.ModuleList(Attention(shape, shape.width) for _ in range(shape.layers))
        has_perceptron = shape.mlp != 0
        self.perceptrons = nn.ModuleList(
            nn.Sequential(shape.norm(), Perceptron(shape)) for _ in range(shape.layers if has_perceptron else 0)
        )
        self.project = nn.Linear(shape.width, out_width, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        """Maps (batch, tokens, context width) to (batch, latents, out width)."""
        context = self.enter(context)
        x = self.latents.expand(len(context), -1, -1)
        for index, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            x = x + attention(norm(x), context)
            if len(self.perceptrons):
                x = x + self.perceptrons[index](x)
        return self.project(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Dimensions of a tower: input, tokens, and output to the fusion."""

    sample: tuple[int, ...]
    """Shape of a sample, such as (3, height, width); (tokens,) for ids."""
    blocks: Blocks
    patch: tuple[int, ...] = ()
    """Shape of a patch; empty for ids."""
    stride: tuple[int, ...] = ()
    """Stride of patches; by default ``patch``."""
    vocabulary: int = 0
    """Vocabulary of its own embedding; 0 with an empty ``patch``: shares the backbone's embedding."""
    convolutions: bool = False
    """True: two convolutions that halve bands and frames replace patches (OFASys's audio)."""
    count: int = 1
    """Samples per row, such as four earlier images."""
    merged: int = 1
    """Number of adjacent tokens to merge: by mean, or by concatenation with a ``projector``."""
    latents: int = 0
    """Tokens per sample after a resampler; 0: no resampler."""
    resampler: Blocks | None = None
    """Stack of the resampler; ``mlp=0``: without MLPs."""
    projector: int = 0
    """Inner width of an MLP after the tower; 0: one linear layer."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of tokens along each axis."""
        strides = self.stride or self.patch
        return tuple((size - p) // s + 1 for size, p, s in zip(self.sample[1:], self.patch, strides, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens per sample in the blocks."""
        if self.convolutions:
            return self.sample[-1] // 4
        return math.prod(self.grid) if self.patch else self.sample[0]

    @property
    def out_tokens(self) -> int:
        """Tokens per row for the fusion."""
        return self.count * (self.latents or self.num_tokens // self.merged)

    def tiny(self) -> Encoder:
        """Returns the same kind of tower for samples of a few patches."""
        patch = tuple(min(size, 8) for size in self.patch)
        extent = tuple(4 * size for size in patch) if patch else (6,)
        if self.convolutions:
            extent = (8, 16)
        return replace(
            self,
            sample=(*self.sample[:1], *extent) if self.patch or self.convolutions else extent,
            blocks=self.blocks.tiny(),
            patch=patch,
            stride=tuple(min(size, 6) for size in self.stride),
            vocabulary=min(self.vocabulary, 64),
            count=min(self.count, 2),
            merged=min(self.merged, 4),
            latents=min(self.latents, 2),
            resampler=self.resampler and replace(self.resampler.tiny(), mlp=self.resampler.mlp and 64),
            projector=min(self.projector, 64),
        )


class Tower(nn.Module):
    """A transformer over the tokens of one modality, projected for the fusion.

    Args:
        config: Dimensions.
        out_width: Width of the result.
        pooled: True: the result is one vector, (batch, out width), and attention over ids is causal; False: all tokens,
            (batch, tokens, out width).
    """

    def __init__(self, config: Encoder, out_width: int, *, pooled: bool = False) -> None:
        super().__init__()
        width = config.blocks.width
        self.config, self.pooled = config, pooled
        self.tokens = _tokens(config)
        self.positions = nn.Parameter(0.02 * torch.randn(config.num_tokens, width))
        self.stack = Stack(config.blocks)
        self.resampler: nn.Module | None = None
        self.project: nn.Module = nn.Identity()
        if config.resampler is not None:
            self.resampler = Resampler(config.latents, config.resampler, width, out_width)
        elif config.projector:
            joined = config.merged * width
            self.project = nn.Sequential(
                nn.Linear(joined, config.projector), nn.GELU(), nn.Linear(config.projector, out_width)
            )
        elif pooled or width != out_width:
            self.project = nn.Linear(width, out_width, bias=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Encodes a batch of samples, ids or embedded ids; see the class for the result."""
        config = self.config
        rows = samples.flatten(0, 1) if config.count > 1 else samples
        tokens = self.tokens(rows)
        hidden = self.stack(tokens + self.positions[: tokens.shape[1]], causal=self.pooled and not config.patch)
        if self.pooled:
            return self.project(hidden.mean(1) if config.patch else hidden[:, -1])  # type: ignore[no-any-return]
        if self.resampler is not None:
            hidden = self.resampler(hidden)
        else:
            if config.merged > 1:
                hidden = hidden.unflatten(1, (-1, config.merged))
                hidden = hidden.flatten(2) if config.projector else hidden.mean(2)
            hidden = self.project(hidden)
        if config.count > 1:
            hidden = hidden.unflatten(0, (-1, config.count)).flatten(1, 2)
        return hidden  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Embeds patches of samples; patches without overlap by one matrix product.

    A product needs no cuDNN, which failed on streams of other contexts (pytorch#84309).
    """

    def __init__(self, config: Encoder) -> None:
        super().__init__()
        convolution: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(config.patch)]
        self.cut = convolution(config.sample[0], config.blocks.width, config.patch, config.stride or config.patch)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, channels, ...) to (batch, tokens, width)."""
        if self.cut.kernel_size != self.cut.stride:
            return self.cut(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
        axes = range(2, x.dim())
        for axis, size in zip(reversed(axes), reversed(self.cut.kernel_size), strict=True):
            x = x.narrow(axis, 0, x.shape[axis] // size * size).unflatten(axis, (-1, size))
        places = [2 * axis - 2 for axis in axes]
        patches = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + len(places)).flatten(1, -2)
        return F.linear(patches, self.cut.weight.flatten(1), self.cut.bias)


class Convolutions(nn.Module):
    """Two convolutions that each halve bands and frames, and a projection of the remaining bands."""

    def __init__(self, config: Encoder) -> None:
        super().__init__()
        width = config.blocks.width
        self.first, self.second = nn.Conv2d(1, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.project = nn.Linear(width * (config.sample[1] // 4), width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, 1, bands, frames) to (batch, frames / 4, width)."""
        hidden = F.relu(self.second(F.relu(self.first(x))))
        return self.project(hidden.permute(0, 3, 1, 2).flatten(2))  # type: ignore[no-any-return]


def embedding(vocabulary: int, width: int) -> nn.Embedding:
    """Returns an embedding with small initial weights, as in language models."""
    table = nn.Embedding(vocabulary, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


def _tokens(config: Encoder) -> nn.Module:
    if config.convolutions:
        return Convolutions(config)
    if config.patch:
        return Patches(config)
    return embedding(config.vocabulary, config.blocks.width) if config.vocabulary else nn.Identity()


def _angles(tokens: int, width: int, device: torch.device) -> Tensor:
    """Returns cosines and sines of rotary positions (RoFormer), (2, tokens, width)."""
    inverse = 10_000.0 ** (torch.arange(0, -width, -2, device=device) / width)
    turned = torch.arange(tokens, device=device).unsqueeze(1) * inverse.repeat(2)
    return torch.stack((turned.cos(), turned.sin()))


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]
