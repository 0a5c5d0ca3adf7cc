"""Operators of a transformer's layer by closed formulas, on one rank of tensor and context parallelism.

n tokens in sequences of s, hidden width h, MLP width f, a heads of width d in g groups, tensor degree t, context degree
c; numbers of 2 bytes. A product of (m, k) and (k, n) has 2 m n k operations. Fused attention has 4 s^2 a d for each
sequence, half of that where it is causal, and 2.5 times as many in backward, which computes the scores again (Dao et
al. 2022, arXiv 2205.14135). Tensor and sequence parallelism are Megatron's (Shoeybi et al. 2020, arXiv 1909.08053;
Korthikanti et al. 2022, arXiv 2205.05198, figure 5): tokens are split over the tensor peers around norms and residuals,
gathered before the first product of each half of a layer and reduce-scattered behind the second; backward does the
reverse, and gathers the inputs of the first products again for the weights' gradients. Context ranks have blocks of
tokens, filled to one length, and their attention is that of ``mosaic.context``'s plan (``attention_core.py``).

What a layer keeps for backward follows from the steps: 32 n h bytes for a plain layer on one rank, which is
Korthikanti's 34 n h without the two masks of dropout, and without scores, which fused attention does not keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mosaic.pipelining.semu.rank_hardware import Collective, Degrees
from mosaic.pipelining.workload.attention_core import Core, fetched_keys
from mosaic.pipelining.workload.layer_steps import (
    ITEM_BYTES,
    Gathered,
    LayerStep,
    ModuleLoad,
    memory_of,
    product_of,
)
from mosaic.pipelining.workload.sequence_share import (
    PLAIN_SHARING,
    ContextSharing,
    SequenceShare,
    share_sequences,
)
from mosaic.pipelining.workload.shapes import TransformerShape


@dataclass(slots=True)
class StepWriter:
    """Writes the steps of a layer one after the other."""

    shape: TransformerShape
    """The layer."""
    degrees: Degrees
    load: ModuleLoad
    sharing: ContextSharing = PLAIN_SHARING
    """Sharing of context peers."""
    steps: list[LayerStep] = field(default_factory=list)
    """Steps so far."""

    @property
    def share(self) -> SequenceShare | None:
        """Share of context ranks, or of one rank with a mask; None: one rank with full or causal attention."""
        is_causal = self.shape.causal
        if self.degrees.context == 1 and not (is_causal and self.sharing.mask):
            return None
        load, ranks = self.load, self.degrees.context
        return share_sequences(
            self.sharing, sequences=load.sequences, tokens=load.tokens, ranks=ranks, is_causal=is_causal
        )

    @property
    def context_tokens(self) -> int:
        """Tokens on one context rank."""
        share = self.share
        return self.load.sequences * self.load.tokens if share is None else share.local_tokens

    @property
    def own_tokens(self) -> int:
        """Tokens on one rank if they are split over the tensor peers too."""
        return -(-self.context_tokens // self.degrees.tensor)

    @property
    def own_bytes(self) -> int:
        """Bytes of these tokens between two layers."""
        return self.own_tokens * self.shape.hidden * ITEM_BYTES

    @property
    def output_rows(self) -> int:
        """Those of these tokens that leave the module."""
        load, degrees = self.load, self.degrees
        tokens = load.sequences * (load.outputs or load.tokens)
        return max(1, -(-tokens // (degrees.tensor * degrees.context)))

    @property
    def key_heads(self) -> int:
        """Heads of keys on one rank, and as many of values; more tensor peers than groups have copies of them."""
        return max(1, self.shape.groups // self.degrees.tensor)

    def layer(self, source: str) -> str:
        """Writes one layer, and returns the name of its output."""
        at = self.attention(source, "attention", crosses=False)
        if self.shape.cross:
            at = self.attention(at, "cross", crosses=True)
        return self.mlp(at)

    def attention(self, source: str, name: str, *, crosses: bool) -> str:
        """Writes norm, projections, attention and residual."""
        shape, t = self.shape, self.degrees.tensor
        normed = self.gathered(self.norm(source, name), name)
        query, key = shape.query_width // t, 2 * self.key_heads * shape.head_dim
        if crosses:
            self.product(f"{name} q", normed, shape.hidden, query)
            rows = max(1, self.load.sequences * self.load.context)
            self.product(f"{name} kv", "context", shape.hidden, key, rows=rows)
            core = self._core(name, (f"{name} q", f"{name} kv"), crosses=True)
        else:
            self.product(f"{name} qkv", normed, shape.hidden, query + key)
            core = self._core(name, (f"{name} qkv",), crosses=False)
        self.product(f"{name} out", core, query, shape.hidden)
        return self.add(source, self.scattered(f"{name} out", name), name)

    def mlp(self, source: str) -> str:
        """Writes norm, both products and residual."""
        shape, t = self.shape, self.degrees.tensor
        normed = self.gathered(self.norm(source, "mlp"), "mlp")
        inner = max(1, shape.ffn // t)
        self.product("mlp up", normed, shape.hidden, inner * (2 if shape.gated else 1))
        width = inner * ITEM_BYTES * self.context_tokens
        read = width * (2 if shape.gated else 1)
        self.steps.append(
            LayerStep(
                name="mlp act",
                forward=memory_of("act", read, width),
                reads=("mlp up",),
                writes="mlp act",
                num_bytes=width,
                backward=(memory_of("act backward", read + width, read),),
                saved=("mlp up",),
            )
        )
        self.product("mlp down", "mlp act", inner, shape.hidden)
        return self.add(source, self.scattered("mlp down", "mlp"), "mlp")

    def norm(self, source: str, name: str) -> str:
        """Writes a norm on tokens that are split over the tensor peers."""
        num_bytes = self.own_bytes
        self.steps.append(
            LayerStep(
                name=f"{name} norm",
                forward=memory_of("norm", num_bytes, num_bytes),
                reads=(source,),
                writes=f"{name} norm",
                num_bytes=num_bytes,
                backward=(memory_of("norm backward", 3 * num_bytes, num_bytes),),  # adds the residual's gradient
                saved=(source,),
            )
        )
        return f"{name} norm"

    def gathered(self, source: str, name: str) -> Gathered:
        """Writes the gathering of tokens before a product; its backward reduce-scatters."""
        if self.degrees.tensor == 1:
            return Gathered(tensor=source, kept=source)
        num_bytes = self.context_tokens * self.shape.hidden * ITEM_BYTES
        gather = Collective(name=f"{name} gather", num_bytes=num_bytes, axis="tensor")
        self.steps.append(
            LayerStep(
                name=f"{name} gather",
                forward=gather,
                reads=(source,),
                writes=f"{name} gathered",
                num_bytes=num_bytes,
                backward=(Collective(name=f"{name} scatter backward", num_bytes=num_bytes, axis="tensor"),),
            )
        )
        return Gathered(tensor=f"{name} gathered", kept=source, again=gather)

    def scattered(self, source: str, name: str) -> str:
        """Writes the reduce-scatter behind a product; its backward gathers."""
        if self.degrees.tensor == 1:
            return source
        num_bytes = self.context_tokens * self.shape.hidden * ITEM_BYTES
        self.steps.append(
            LayerStep(
                name=f"{name} scatter",
                forward=Collective(name=f"{name} scatter", num_bytes=num_bytes, axis="tensor"),
                reads=(source,),
                writes=f"{name} scattered",
                num_bytes=self.own_bytes,
                backward=(Collective(name=f"{name} gather backward", num_bytes=num_bytes, axis="tensor"),),
            )
        )
        return f"{name} scattered"

    def product(
        self, name: str, source: str | Gathered, k: int, n: int, *, rows: int = 0, is_first: bool = False
    ) -> str:
        """Writes a matrix product of tokens with weights; it keeps its input before the gathering.

        The first product of a model needs no gradient of its input.
        """
        m = rows or self.context_tokens
        if isinstance(source, str):
            source = Gathered(tensor=source, kept=source)
        self.steps.append(
            LayerStep(
                name=name,
                forward=product_of(m, n, k),
                reads=(source.tensor,),
                writes=name,
                num_bytes=m * n * ITEM_BYTES,
                backward=() if is_first else (product_of(m, k, n),),
                weights=(product_of(k, n, m),),
                again=source.again,
                saved=(source.kept,),
            )
        )
        return name

    def add(self, residual: str, source: str, name: str) -> str:
        """Writes the sum with the residual."""
        num_bytes = self.own_bytes
        self.steps.append(
            LayerStep(
                name=f"{name} add",
                forward=memory_of("add", 2 * num_bytes, num_bytes),
                reads=(residual, source),
                writes=f"{name} sum",
                num_bytes=num_bytes,
                backward=(),
            )
        )
        return f"{name} sum"

    def _core(self, name: str, sources: tuple[str, ...], *, crosses: bool) -> str:
        """Writes fused attention within sequences, or across them and those of another module."""
        shape, load, rows = self.shape, self.load, self.context_tokens
        seen, share = (load.context, None) if crosses else (load.tokens, self.share)
        heads, fetched = max(1, shape.heads // self.degrees.tensor), None
        width = heads * shape.head_dim
        if share is None:
            flops = 4 * rows * max(1, seen) * width // (2 if shape.causal and not crosses else 1)
        else:
            flops = 4 * share.pairs * width
        if share is not None and share.ranks > 1:
            fetched = fetched_keys(
                name, share, key_heads=self.key_heads, head_dim=shape.head_dim, heads=self.sharing.heads
            )
        core = Core(
            flops=flops,
            sequences=max(1, load.sequences) if fetched is None else 1,
            rows=rows,
            keys=max(1, load.sequences * seen) if share is None else share.fetched_tokens,
            heads=heads,
            head_dim=shape.head_dim,
            key_heads=self.key_heads,
        )
        self.steps.append(core.step(name, sources, fetched))
        return f"{name} core"


def write_first(writer: StepWriter) -> str:
    """Writes the steps before the first layer: the projection of patches, or the lookup of tokens."""
    shape = writer.shape
    if shape.patch:
        return writer.product("patches", "raw", shape.patch, shape.hidden, rows=writer.own_tokens, is_first=True)
    if not shape.vocabulary:
        return "x"
    num_bytes = writer.own_bytes
    writer.steps.append(
        LayerStep(
            name="lookup",
            forward=memory_of("lookup", num_bytes, num_bytes),
            reads=(),
            writes="looked up",
            num_bytes=num_bytes,
            backward=(),
            weights=(memory_of("lookup backward", 2 * num_bytes, num_bytes),),
        )
    )
    return "looked up"


def write_head(writer: StepWriter, source: str) -> str:
    """Writes norm, product with the vocabulary and cross entropy, whose columns are split over the tensor peers."""
    shape = writer.shape
    normed = writer.gathered(writer.norm(source, "head"), "head")
    width = -(-shape.vocabulary // writer.degrees.tensor)
    writer.product("logits", normed, shape.hidden, width)
    single_bytes = writer.context_tokens * width * 4
    writer.steps.append(
        LayerStep(
            name="loss",
            forward=memory_of("cross entropy", 3 * single_bytes, single_bytes),
            reads=("logits",),
            writes="softmax",
            num_bytes=single_bytes,
            backward=(memory_of("cross entropy backward", single_bytes, single_bytes // 2),),
            saved=("softmax",),
        )
    )
    return "softmax"


def write_projector(writer: StepWriter, source: str, width: int) -> str:
    """Writes one product to the width of the output's reader, over merged tokens side by side."""
    return writer.product(
        "projector", source, projected_width(writer.shape, writer.load), width, rows=writer.output_rows
    )


def write_gathered(writer: StepWriter, source: str, num_bytes: int) -> str:
    """Writes the gathering of a module's output, of all context ranks: who reads it merges whole sequences."""
    writer.steps.append(
        LayerStep(
            name="output gather",
            forward=Collective(name="output gather", num_bytes=num_bytes, axis="context"),
            reads=(source,),
            writes="gathered output",
            num_bytes=num_bytes,
            backward=(Collective(name="output scatter backward", num_bytes=num_bytes, axis="context"),),
        )
    )
    return "gathered output"


def projected_width(shape: TransformerShape, load: ModuleLoad) -> int:
    """Returns the width of what a projector reads."""
    return shape.hidden * max(1, load.tokens // (load.outputs or load.tokens))


def source_bytes(writer: StepWriter) -> dict[str, int]:
    """Returns the bytes of what a layer may read from outside, on this rank."""
    return {
        "x": writer.own_bytes,
        "raw": writer.own_tokens * writer.shape.patch * ITEM_BYTES,
        "context": writer.load.sequences * writer.load.context * writer.shape.hidden * ITEM_BYTES,
    }
