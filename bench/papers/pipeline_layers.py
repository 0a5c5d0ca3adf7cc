"""Transformers of papers as torch modules on the meta device: counted for each size of input, then tables of layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.papers.data_sets import Microbatch
from mosaic.cost.counting import count_module
from mosaic.cost.counts import ModuleCounts
from mosaic.pipelining.layers import Layer, Strategy
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.pipelining.rank_layer import PLAIN_SHARING, ContextSharing, RankShare, rank_layer, rank_share

ITEM_BYTES = 2
"""Of a number in bfloat16."""
WINDOW_S = 30.0
"""Seconds of audio in a window; shorter windows are padded, as in Whisper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A stack of equal layers, each attention and then an MLP, with norms before them.

    Biases and norms' weights are left out: they are below 0.1 % of the parameters.
    """

    layers: int
    hidden: int
    """Width between layers."""
    ffn: int
    """Width within an MLP."""
    heads: int
    """Heads of queries."""
    groups: int
    """Heads of keys and values; as many as ``heads`` without grouping."""
    gated: bool = False
    """True for an MLP with a gate, as SwiGLU: three matrices instead of two."""
    causal: bool = False
    cross: bool = False
    """True for a second attention in each layer to another module's output, of this width."""
    vocabulary: int = 0
    """Rows of the token embedding before the first layer; 0: none."""
    tied: bool = False
    """True if the head shares this table."""
    patch: int = 0
    """Numbers in a patch, frame or latent for a projection before the first layer; 0: none."""

    @property
    def head_dim(self) -> int:
        return max(1, self.hidden // self.heads)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.groups * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: (2 + 2 g/a) h^2 of attention, as many across, 2 h f of the MLP (gated: 3)."""
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        return attention * (2 if self.cross else 1) + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def first_parameters(self) -> int:
        return (self.vocabulary + self.patch) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of its own head; 0 if it is tied."""
        return 0 if self.tied else self.vocabulary * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoad:
    sequences: int
    """Number of equally long sequences; attention stays within each."""
    tokens: int
    context: int = 0
    """Tokens of another module that each sequence attends to."""
    outputs: int = 0
    """Output tokens of each sequence if they are merged before a projector; 0: as many."""


Unit = Literal["text", "image", "audio", "video"]
"""Unit of a module's pieces: packed text as one, images, windows of audio, or clips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Tokens that a module reads of each modality."""

    unit: Unit
    """Unit of pieces; with ``text`` all modalities are one sequence."""
    text: bool = False
    """True if it reads the text: as tokens, or by cross attention with another unit."""
    image_tokens: int = 0
    window_tokens: int = 0
    video_tokens_per_s: float = 0.0
    merges: int = 1
    """Number of tokens merged into one output."""

    def units(self, microbatch: Microbatch) -> int:
        if self.unit == "image":
            return microbatch.images
        if self.unit == "audio":
            return _windows(microbatch)
        if self.unit == "video":
            return microbatch.clips or int(microbatch.video_s > 0)
        return 1 if self._packed(microbatch) else 0

    def load(self, microbatch: Microbatch, units: int) -> ModuleLoad:
        """Returns the load of ``units`` of a microbatch's units.

        Raises:
            ValueError: The microbatch has fewer.
        """
        most = self.units(microbatch)
        if not 1 <= units <= most:
            raise ValueError(f"units={units} of a microbatch that has {most} ({self.unit}); use 1 to {most}")
        if self.unit == "text":
            return ModuleLoad(sequences=1, tokens=self._packed(microbatch))
        if self.unit == "video":
            tokens = max(1, round(self.video_tokens_per_s * microbatch.video_s / most))
            context = -(-microbatch.text_tokens // most) if self.text else 0
            return ModuleLoad(sequences=units, tokens=tokens, context=context)
        tokens = self.image_tokens if self.unit == "image" else self.window_tokens
        return ModuleLoad(sequences=units, tokens=tokens, outputs=-(-tokens // self.merges))

    def _packed(self, microbatch: Microbatch) -> int:
        return (
            (microbatch.text_tokens if self.text else 0)
            + self.image_tokens * microbatch.images
            + self.window_tokens * _windows(microbatch)
            + round(self.video_tokens_per_s * microbatch.video_s)
        )


def _windows(microbatch: Microbatch) -> int:
    return math.ceil(microbatch.audio_s / WINDOW_S)


class Block(nn.Module):
    """One layer: norm and attention, across another module's output too if the shape says so, then norm and MLP."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        hidden, query, key = shape.hidden, shape.query_width, shape.key_width
        linear = functools.partial(nn.Linear, bias=False)
        self.shape = shape
        self.norm, self.mlp_norm = (nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.qkv, self.out = linear(hidden, query + 2 * key), linear(query, hidden)
        if shape.cross:
            self.cross_norm = nn.LayerNorm(hidden, bias=False)
            self.cross_q, self.cross_kv = linear(hidden, query), linear(hidden, 2 * key)
            self.cross_out = linear(query, hidden)
        self.up = linear(hidden, shape.ffn * (2 if shape.gated else 1))
        self.down = linear(shape.ffn, hidden)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        query, key = self.shape.query_width, self.shape.key_width
        q, k, v = self.qkv(self.norm(x)).split((query, key, key), -1)
        x = x + self.out(self._attend(q, k, v, is_causal=self.shape.causal))
        if context is not None:
            k, v = self.cross_kv(context).split((key, key), -1)
            x = x + self.cross_out(self._attend(self.cross_q(self.cross_norm(x)), k, v))
        rows = self.up(self.mlp_norm(x))
        if self.shape.gated:
            gate, rows = rows.chunk(2, -1)
            rows = functional.silu(gate) * rows
        else:
            rows = functional.gelu(rows)
        return x + self.down(rows)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for each in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)


class Head(nn.Module):
    """A head over a vocabulary, with its loss."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.linear(x).flatten(0, 1)
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=x.device))


Kind = Literal["block", "patches", "table", "projector", "head"]
"""Kind of a counted module."""


@functools.lru_cache(maxsize=4096)
def counted(kind: Kind, shape: TransformerShape, width: int, load: ModuleLoad, *, trains: bool) -> ModuleCounts:
    """Returns the counts of a module of ``shape``'s width on one device, in bfloat16; ``width`` is of a projector."""
    rows, outputs = (load.sequences, load.tokens), load.outputs or load.tokens
    empty = functools.partial(torch.empty, dtype=torch.bfloat16)
    with torch.device("meta"):
        inputs: list[Tensor] = [empty(*rows, shape.hidden, requires_grad=True)]
        module: nn.Module
        if kind == "block":
            module = Block(shape)
            if shape.cross and load.context:
                inputs.append(empty(rows[0], load.context, shape.hidden, requires_grad=True))
        elif kind == "patches":
            module, inputs = nn.Linear(shape.patch, shape.hidden, bias=False), [empty(*rows, shape.patch)]
        elif kind == "table":
            module, inputs = nn.Embedding(shape.vocabulary, shape.hidden), [torch.empty(rows, dtype=torch.long)]
        elif kind == "projector":
            merged = shape.hidden * (load.tokens // outputs)
            module, inputs = nn.Linear(merged, width, bias=False), [empty(rows[0], outputs, merged, requires_grad=True)]
        else:
            module = Head(shape.hidden, shape.vocabulary)
        return count_module(module.bfloat16().requires_grad_(trains), inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """A transformer on the ranks of a machine; a ``LayeredModule``.

    The first layer includes the steps before it, and the last one a head with its loss. The last layer also includes a
    projector, except behind frozen layers: there it trains, and is a last layer of its own.
    """

    name: str
    shape: TransformerShape
    machine: RankHardware
    intake: Intake
    is_frozen: bool = False
    """True if its weights except a projector do not train."""
    has_head: bool = False
    """True if it ends in a head over its vocabulary and a loss."""
    projects_to: int = 0
    """Output width of its projector; 0: none."""
    sharing: ContextSharing = PLAIN_SHARING
    """Sharing of its inputs over the context ranks."""

    @property
    def trains(self) -> tuple[bool, ...]:
        own = (not self.is_frozen,) * self.shape.layers
        return (*own, True) if self._projects_apart else own

    def num_parameters(self, first: int, count: int) -> int:
        return sum(self._parameters(layer) for layer in range(first, first + count))

    def state_bytes(self, first: int, count: int) -> int:
        """Returns the constant bytes of these layers on a rank.

        Weights in bfloat16, 2 bytes each; if they train also a gradient in float32, 4, and the distributed
        optimizer's share of float32 weights and AdamW's moments, 12 over the data and context ranks (Megatron-LM,
        docs "distributed optimizer": 6 + 12 / d bytes).
        """
        degrees = self.machine.degrees
        total = 0.0
        for layer in range(first, first + count):
            per = ITEM_BYTES + (4 + 12 / (degrees.data * degrees.context) if self.trains[layer] else 0)
            total += self._parameters(layer, with_copies=True) / degrees.tensor * per
        return round(total)

    def units(self, microbatch: Microbatch) -> int:
        return self.intake.units(microbatch)

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        return self._timed(self.intake.load(microbatch, units))

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes between two of its layers on one rank; its output counts the same."""
        load = self.intake.load(microbatch, units)
        return round(self._hidden_bytes(load) * self._share(load).rows / self.machine.degrees.tensor)

    def output_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes that leave one rank; each context rank sends the gathered output."""
        load = self.intake.load(microbatch, units)
        is_gathered = self.projects_to and self._share(load).rows < 1
        return self._gathered_bytes(load) if is_gathered else self.boundary_bytes(microbatch, units)

    def forward_flops(self, microbatch: Microbatch, units: int) -> int:
        """Returns the operations of forward without repetition over ranks; a step has three times as many."""
        load, shape = self.intake.load(microbatch, units), self.shape
        kinds: list[Kind] = ["block"] * shape.layers + ["patches"] * bool(shape.patch) + ["head"] * self.has_head
        kinds += ["projector"] * bool(self.projects_to)
        return sum(self._counted(kind, load).forward.flops for kind in kinds)

    @functools.lru_cache(maxsize=8192)  # noqa: B019
    def _timed(self, load: ModuleLoad) -> tuple[Layer, ...]:
        middle = self._layer("block", load)
        layers = [middle] * self.shape.layers
        if self.shape.patch or self.shape.vocabulary:
            layers[0] = _sum(layers[0], self._layer("patches" if self.shape.patch else "table", load))
        if self.has_head:
            layers[-1] = _sum(layers[-1], self._layer("head", load))
        if self.projects_to:
            projector = self._layer("projector", load)
            if self._share(load).rows < 1:  # every context rank reads all of the output
                gather = self.machine.gather_ns(self._gathered_bytes(load), "context")
                projector = dataclasses.replace(
                    projector,
                    forward_ms=projector.forward_ms + gather / 1e6,
                    backward_ms=projector.backward_ms + gather / 1e6,
                )
            layers[-1:] = [layers[-1], projector] if self._projects_apart else [_sum(layers[-1], projector)]
        return tuple(layers)

    @property
    def _projects_apart(self) -> bool:
        return bool(self.projects_to) and self.is_frozen

    def _parameters(self, layer: int, *, with_copies: bool = False) -> int:
        shape, last = self.shape, self.shape.layers - 1
        if layer > last:
            return self._projector_parameters
        count = shape.layer_parameters + (shape.first_parameters if layer == 0 else 0)
        if layer == last:
            count += 0 if self._projects_apart else self._projector_parameters
            if self.has_head:
                copied = with_copies and layer > 0
                count += shape.vocabulary * shape.hidden if copied else shape.head_parameters
        return count

    @property
    def _projector_parameters(self) -> int:
        return self.shape.hidden * self.intake.merges * self.projects_to

    def _counted(self, kind: Kind, load: ModuleLoad) -> ModuleCounts:
        trains = not self.is_frozen or kind == "projector"
        if kind != "projector":
            load = dataclasses.replace(load, outputs=0)
        return counted(kind, self.shape, self.projects_to if kind == "projector" else 0, load, trains=trains)

    def _layer(self, kind: Kind, load: ModuleLoad) -> Layer:
        return rank_layer(
            self._counted(kind, load),
            self.machine,
            hidden_bytes=self._hidden_bytes(load) if kind == "block" else 0,
            trains=not self.is_frozen or kind == "projector",
            share=self._share(load),
            halves=3 if self.shape.cross else 2,
        )

    def _share(self, load: ModuleLoad) -> RankShare:
        return rank_share(
            self.sharing,
            self.machine.degrees,
            sequences=load.sequences,
            tokens=load.tokens,
            is_causal=self.shape.causal,
            has_items=bool(self.projects_to),
        )

    def _hidden_bytes(self, load: ModuleLoad) -> int:
        return load.sequences * load.tokens * self.shape.hidden * ITEM_BYTES

    def _gathered_bytes(self, load: ModuleLoad) -> int:
        rows = load.sequences * (load.outputs or load.tokens)
        return round(rows * self._share(load).rows * self.machine.degrees.context) * self.projects_to * ITEM_BYTES


def _sum(layer: Layer, other: Layer) -> Layer:
    """Returns a layer with the steps before or behind it."""
    return Layer(
        forward_ms=layer.forward_ms + other.forward_ms,
        backward_ms=layer.backward_ms + other.backward_ms,
        weights_ms=layer.weights_ms + other.weights_ms,
        strategies=tuple(
            Strategy(
                name=strategy.name,
                kept_bytes=strategy.kept_bytes + another.kept_bytes,
                extra_backward_ms=strategy.extra_backward_ms + another.extra_backward_ms,
            )
            for strategy, another in zip(layer.strategies, other.strategies, strict=True)
        ),
        workspace_bytes=max(layer.workspace_bytes, other.workspace_bytes),
    )
