"""Attention of all kinds: self or cross, grouped heads, normed queries, rotary positions on one to three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of every token's positions, each (..., tokens, head width)."""


class Rotary(nn.Module):
    """Turns positions into angles (RoFormer, Su et al. 2021), on one axis or several.

    Args:
        head_width: Features of a head; each pair of them has a frequency.
        theta: Base of the frequencies.
        layout: Which axis turns which frequency. ``line``: one axis. ``grid``: rows turn the first half, columns the
            second, with the same frequencies (vision transformers). Three numbers: Qwen3-VL's interleaved sections of
            time, height and width, which take turns from the highest frequency on until a section is used up; time
            takes the rest.
    """

    inverse: Tensor
    axes: Tensor

    def __init__(
        self,
        head_width: int,
        theta: float = 10_000.0,
        layout: Literal["line", "grid"] | tuple[int, int, int] = "line",
    ) -> None:
        super().__init__()
        pairs = head_width // 2
        if isinstance(layout, tuple) and sum(layout) != pairs:
            raise ValueError(f"layout={layout} sums to {sum(layout)}; a head of {head_width} has {pairs} frequencies")
        each = pairs // 2 if layout == "grid" else pairs
        inverse = theta ** -(torch.arange(each, dtype=torch.float32) / each)
        self.register_buffer("inverse", inverse.repeat(pairs // each), persistent=False)
        self.register_buffer("axes", torch.tensor(_axes(layout, pairs)), persistent=False)

    def forward(self, positions: Tensor) -> Angles:
        """Takes (..., tokens, axes), any number type; returns cosines and sines, (..., tokens, head width), float32."""
        turned = positions.float().index_select(-1, self.axes) * self.inverse
        angles = torch.cat((turned, turned), dim=-1)
        return angles.cos(), angles.sin()


def _axes(layout: str | tuple[int, int, int], pairs: int) -> Sequence[int]:
    if layout == "line":
        return [0] * pairs
    if isinstance(layout, str):
        return [0] * (pairs // 2) + [1] * (pairs // 2)
    return [index % 3 if index // 3 < layout[index % 3] else 0 for index in range(pairs)]


class RMSNorm(nn.RMSNorm):
    """A root-mean-square norm in its input's own precision, as one kernel under autocast, too."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (..., width)."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def line_positions(tokens: int, device: torch.device) -> Tensor:
    """Returns the positions of a sequence, (tokens, 1)."""
    return torch.arange(tokens, device=device).unsqueeze(-1)


def grid_positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns the positions of a grid row by row, (rows * columns, 2)."""
    row = torch.arange(rows, device=device).repeat_interleave(columns)
    column = torch.arange(columns, device=device).repeat(rows)
    return torch.stack((row, column), dim=-1)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turns the pairs of features of (batch, heads, tokens, head width) by angles of (..., tokens, head width)."""
    cosines, sines = (part if part.dim() == 2 else part.unsqueeze(1) for part in angles)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cosines + turned * sines).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention of tokens over themselves or over a context.

    Args:
        width: Features of a token.
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of ``heads``; as many as ``heads`` by default.
        head_width: Features of a head; ``width / heads`` by default.
        bias: Whether the projections of queries, keys and values have biases.
        out_bias: Whether the projection of the result has one.
        qk_norm: Whether queries and keys are RMS-normed a head (Qwen3, Unified-IO 2).
        bias_kv: Whether a learned key and value are appended to the tokens' own (ImageBind).
        context_width: Features of a context token, for cross-attention; None for self-attention.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        bias_kv: bool = False,
        context_width: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}; use a divisor")
        self.head_width = head_width or width // heads
        queries, others = self.heads * self.head_width, 2 * self.kv_heads * self.head_width
        self.crosses = context_width is not None
        if context_width is None:
            self.query_key_value = nn.Linear(width, queries + others, bias=bias)
        else:
            self.query = nn.Linear(width, queries, bias=bias)
            self.key_value = nn.Linear(context_width, others, bias=bias)
        self.out = nn.Linear(queries, width, bias=out_bias)
        self.query_norm = RMSNorm(self.head_width, eps=1e-6) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.head_width, eps=1e-6) if qk_norm else nn.Identity()
        self.bias_kv = nn.Parameter(0.02 * torch.randn(2, self.kv_heads, 1, self.head_width)) if bias_kv else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Takes (batch, tokens, width), for cross-attention also (batch, context tokens, context width).

        ``mask`` is True where a query (row) may see a key (column): (tokens, keys), or (batch, 1, tokens or 1, keys).
        """
        query, key, value = self._project(x, context)
        query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast norms in float32
        if self.bias_kv is not None:
            more = self.bias_kv.to(value.dtype).unsqueeze(1).expand(-1, len(x), -1, -1, -1)
            key, value = torch.cat((key, more[0]), dim=2), torch.cat((value, more[1]), dim=2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads
        )
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if not self.crosses:
            counts = (self.heads, self.kv_heads, self.kv_heads)
            parts = self.query_key_value(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2).split(counts, dim=1)
            return parts[0], parts[1], parts[2]
        if context is None:
            raise ValueError("this is cross-attention; give it a context")
        query = self.query(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        key, value = self.key_value(context).unflatten(-1, (-1, self.head_width)).transpose(1, 2).chunk(2, dim=1)
        return query, key, value
