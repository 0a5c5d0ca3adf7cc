"""Transformer layers of the model zoo: attention, blocks, stacks, and towers that encode one modality."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
"""Added to the variance in every norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Dimensions of a stack of transformer blocks."""

    layers: int
    """Number of blocks; 0 for none."""
    width: int
    """Features of a token."""
    heads: int
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads; ``heads`` by default."""
    head_width: int | None = None
    """Features of a head; ``width / heads`` by default."""
    mlp: int | None = None
    """Features inside the perceptron; ``4 * width`` by default."""
    llama: bool = False
    """LLaMA's kind: RMS norms, a gated perceptron, rotary positions, no biases. Otherwise a vision transformer's."""

    def tiny(self) -> Blocks:
        """Returns the same kind of stack with at most two blocks, 32 wide."""
        small = {"kv_heads": self.kv_heads and 2, "head_width": self.head_width and 8, "mlp": 64}
        return replace(self, layers=min(self.layers, 2), width=32, heads=4, **small)  # type: ignore[arg-type]

    def norm(self) -> nn.Module:
        """Returns a norm over the stack's width."""
        return RMSNorm(self.width, eps=EPS) if self.llama else nn.LayerNorm(self.width, eps=EPS)


class RMSNorm(nn.RMSNorm):
    """A root-mean-square norm in its input's own precision, as one kernel under autocast, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Multi-head attention over the tokens themselves, or over a context of ``context_width`` features."""

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
        """Attends (batch, tokens, width) to itself or to (batch, context tokens, context width).

        Args:
            x: Tokens that ask.
            context: Tokens that answer, for cross-attention.
            angles: Rotary angles of each token, (2, tokens, head width): cosines and sines.
            mask: True where a query (row) may see a key (column); an empty tensor stands for a causal mask.
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
    """Two linear layers with an activation between them; LLaMA's has a gate."""

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
    """Attention, cross-attention where there is a context, and a perceptron, each normed before and added."""

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
    """Blocks one after the other and a norm at the end; LLaMA's kind turns queries and keys by their positions."""

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
        """Takes and returns (batch, tokens, width); masks as in ``Attention``."""
        if causal:
            mask = x.new_empty(0)
        angles = _angles(x.shape[1], self.head_width, x.device) if self.head_width else None
        for block in self.blocks:
            x = block(x, context, angles, mask, context_mask)
        return self.norm(x)  # type: ignore[no-any-return]


class Resampler(nn.Module):
    """Learned latents that attend to a context: any number of tokens becomes ``latents``."""

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
        """Takes (batch, tokens, context width); returns (batch, latents, out width)."""
        context = self.enter(context)
        x = self.latents.expand(len(context), -1, -1)
        for index, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            x = x + attention(norm(x), context)
            if len(self.perceptrons):
                x = x + self.perceptrons[index](x)
        return self.project(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A tower's input, its tokens, and its output to the fusion."""

    sample: tuple[int, ...]
    """Channels and extent of a sample, as (3, height, width); (tokens,) for ids."""
    blocks: Blocks
    patch: tuple[int, ...] = ()
    """Extent of a token; empty for ids."""
    stride: tuple[int, ...] = ()
    """Distance between tokens; ``patch`` by default."""
    vocabulary: int = 0
    """Ids of an embedding of its own; 0 with an empty ``patch``: the backbone's embedding is shared."""
    convolutions: bool = False
    """Two convolutions that halve bands and frames stand in the place of patches (OFASys's audio)."""
    count: int = 1
    """Samples of a row, such as four earlier images."""
    merged: int = 1
    """Neighbouring tokens that become one: their mean, or joined features where there is a ``projector``."""
    latents: int = 0
    """Tokens that a resampler leaves of a sample; 0: no resampler."""
    resampler: Blocks | None = None
    """Of the resampler; ``mlp=0``: without perceptrons."""
    projector: int = 0
    """Width inside a perceptron behind the tower; 0: one linear layer."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis."""
        strides = self.stride or self.patch
        return tuple((size - p) // s + 1 for size, p, s in zip(self.sample[1:], self.patch, strides, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks read of a sample."""
        if self.convolutions:
            return self.sample[-1] // 4
        return math.prod(self.grid) if self.patch else self.sample[0]

    @property
    def out_tokens(self) -> int:
        """Tokens of a row that the fusion gets."""
        return self.count * (self.latents or self.num_tokens // self.merged)

    def tiny(self) -> Encoder:
        """Returns the same kind of tower over samples of a few patches."""
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
        config: What it reads and how large it is.
        out_width: Features of a result.
        pooled: The result is one vector, (batch, out width), and ids look back only; otherwise it is all tokens,
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
        """Takes a batch of samples, ids or embedded ids; see the class for the result."""
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
    """Cuts samples into patches and embeds each; patches that do not overlap are one matrix product of them.

    A product needs no cuDNN, which has refused streams of other contexts (pytorch#84309).
    """

    def __init__(self, config: Encoder) -> None:
        super().__init__()
        convolution: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(config.patch)]
        self.cut = convolution(config.sample[0], config.blocks.width, config.patch, config.stride or config.patch)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, channels, ...); returns (batch, tokens, width)."""
        if self.cut.kernel_size != self.cut.stride:
            return self.cut(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
        axes = range(2, x.dim())
        for axis, size in zip(reversed(axes), reversed(self.cut.kernel_size), strict=True):
            x = x.narrow(axis, 0, x.shape[axis] // size * size).unflatten(axis, (-1, size))
        places = [2 * axis - 2 for axis in axes]
        patches = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + len(places)).flatten(1, -2)
        return F.linear(patches, self.cut.weight.flatten(1), self.cut.bias)


class Convolutions(nn.Module):
    """Two convolutions that halve bands and frames each, and a projection of what is left of the bands."""

    def __init__(self, config: Encoder) -> None:
        super().__init__()
        width = config.blocks.width
        self.first, self.second = nn.Conv2d(1, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.project = nn.Linear(width * (config.sample[1] // 4), width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, 1, bands, frames); returns (batch, frames / 4, width)."""
        hidden = F.relu(self.second(F.relu(self.first(x))))
        return self.project(hidden.permute(0, 3, 1, 2).flatten(2))  # type: ignore[no-any-return]


def embedding(vocabulary: int, width: int) -> nn.Embedding:
    """Returns an embedding that starts small, as language models' do."""
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
    """Returns cosines and sines of positions (RoFormer), (2, tokens, width)."""
    inverse = 10_000.0 ** (torch.arange(0, -width, -2, device=device) / width)
    turned = torch.arange(tokens, device=device).unsqueeze(1) * inverse.repeat(2)
    return torch.stack((turned.cos(), turned.sin()))


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]
