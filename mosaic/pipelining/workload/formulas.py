"""Operators of a transformer's layer by closed formulas, on one rank of tensor and context parallelism.

n tokens in sequences of s, hidden width h, MLP width f, a heads of width d in g groups, tensor degree t, context degree
c; numbers of 2 bytes. A product of (m, k) and (k, n) has 2 m n k operations. Fused attention has 4 s^2 a d for each
sequence, half of that where it is causal, and 2.5 times as many in backward, which computes the scores again (Dao et
al. 2022, arXiv 2205.14135). Tensor and sequence parallelism are Megatron's (Shoeybi et al. 2020, arXiv 1909.08053;
Korthikanti et al. 2022, arXiv 2205.05198, figure 5): tokens are split over the tensor peers around norms and residuals,
gathered before the first product of each half of a layer and reduce-scattered behind the second; backward does the
reverse, and gathers the inputs of the first products again for the weights' gradients. Context parallelism gathers keys
and values, as Llama 3 does (arXiv 2407.21783, section 3.3.2), with causal work spread evenly over the peers.

What a layer keeps for backward follows from the steps: 32 n h bytes for a plain layer on one rank, which is
Korthikanti's 34 n h without the two masks of dropout, and without scores, which fused attention does not keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mosaic.cost.counts import Gemm, Operator, OperatorKind
from mosaic.pipelining.semu.rank_hardware import Collective, Degrees
from mosaic.pipelining.workload.shapes import TransformerShape

ITEM_BYTES = 2
"""Bytes of a number in bfloat16."""
_DTYPE = "bfloat16"

LayerWork = Operator | Collective
"""What a step does: a kernel, or a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoad:
    """What a module is called with."""

    sequences: int
    """Equally long ones; attention stays within each."""
    tokens: int
    """Of each sequence."""
    context: int = 0
    """Tokens of the other module that each sequence reads across."""
    outputs: int = 0
    """Tokens of each sequence that leave the module, where its own are merged before a projector; 0: as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """One operation of a layer, in all phases."""

    name: str
    """In its layer."""
    forward: LayerWork
    """Forward."""
    reads: tuple[str, ...]
    """Tensors."""
    writes: str
    """Tensor."""
    num_bytes: int
    """Of what it writes, on this rank."""
    backward: tuple[LayerWork, ...]
    """Backward for its inputs."""
    weights: tuple[Operator, ...] = ()
    """Backward for its weights."""
    again: Collective | None = None
    """Gathers its input once more for the weights' gradients."""
    saved: tuple[str, ...] = ()
    """Tensors that its backward reads; of a step with weights, that their gradients read."""
    is_cheap: bool = False
    """Whether selective recomputation runs it again instead of keeping what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The input of a product."""

    tensor: str
    """What the product reads."""
    kept: str
    """What its weights' gradients are computed from: the same, or what it was gathered from."""
    again: Collective | None = None
    """Gathers it once more for them."""


@dataclass(slots=True)
class StepWriter:
    """Writes the steps of a layer one after the other."""

    shape: TransformerShape
    """The layer."""
    degrees: Degrees
    """Peers."""
    load: ModuleLoad
    """Data."""
    steps: list[LayerStep] = field(default_factory=list)
    """So far."""

    @property
    def context_tokens(self) -> int:
        """Tokens on one context rank."""
        return -(-self.load.sequences * self.load.tokens // self.degrees.context)

    @property
    def own_tokens(self) -> int:
        """Tokens on one rank where they are split over the tensor peers too."""
        return -(-self.context_tokens // self.degrees.tensor)

    @property
    def own_bytes(self) -> int:
        """Bytes of these tokens between two layers."""
        return self.own_tokens * self.shape.hidden * ITEM_BYTES

    @property
    def key_width(self) -> int:
        """Width of keys and values together on one rank; more tensor peers than groups have copies of them."""
        return 2 * max(1, self.shape.groups // self.degrees.tensor) * self.shape.head_dim

    def layer(self, source: str) -> str:
        """Writes one layer, and returns the name of its output as all others do."""
        at = self.attention(source, "attention", crosses=False)
        if self.shape.cross:
            at = self.attention(at, "cross", crosses=True)
        return self.mlp(at)

    def attention(self, source: str, name: str, *, crosses: bool) -> str:
        """Writes norm, projections, attention and residual."""
        shape, t = self.shape, self.degrees.tensor
        normed = self.gathered(self.norm(source, name), name)
        query, key = shape.query_width // t, self.key_width
        if crosses:
            self.product(f"{name} q", normed, shape.hidden, query)
            rows = max(1, self.load.sequences * self.load.context)
            self.product(f"{name} kv", "context", shape.hidden, key, rows=rows)
            core = self._core(name, (f"{name} q", f"{name} kv"))
        else:
            self.product(f"{name} qkv", normed, shape.hidden, query + key)
            core = self._core(name, (f"{name} qkv", *self._gather_keys(name, key)))
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
                forward=_memory("act", read, width),
                reads=("mlp up",),
                writes="mlp act",
                num_bytes=width,
                backward=(_memory("act backward", read + width, read),),
                saved=("mlp up",),
                is_cheap=True,
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
                forward=_memory("norm", num_bytes, num_bytes),
                reads=(source,),
                writes=f"{name} norm",
                num_bytes=num_bytes,
                backward=(_memory("norm backward", 3 * num_bytes, num_bytes),),  # adds the residual's gradient
                saved=(source,),
                is_cheap=True,
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
        """Writes a matrix product of tokens with weights; its input is kept as it was before it was gathered.

        The first one of a model takes no gradient of its input.
        """
        m = rows or self.context_tokens
        if isinstance(source, str):
            source = Gathered(tensor=source, kept=source)
        self.steps.append(
            LayerStep(
                name=name,
                forward=_product(m, n, k),
                reads=(source.tensor,),
                writes=name,
                num_bytes=m * n * ITEM_BYTES,
                backward=() if is_first else (_product(m, k, n),),
                weights=(_product(k, n, m),),
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
                forward=_memory("add", 2 * num_bytes, num_bytes),
                reads=(residual, source),
                writes=f"{name} sum",
                num_bytes=num_bytes,
                backward=(),
            )
        )
        return f"{name} sum"

    def _gather_keys(self, name: str, width: int) -> tuple[str, ...]:
        """Writes the gathering of keys and values; backward gathers them again, and reduce-scatters their gradients."""
        if self.degrees.context == 1:
            return ()
        num_bytes = self.load.sequences * self.load.tokens * width * ITEM_BYTES
        gather = Collective(name=f"{name} keys", num_bytes=num_bytes, axis="context")
        self.steps.append(
            LayerStep(
                name=f"{name} keys",
                forward=gather,
                reads=(f"{name} qkv",),
                writes=f"{name} keys",
                num_bytes=num_bytes,
                backward=(gather, Collective(name=f"{name} keys backward", num_bytes=num_bytes, axis="context")),
            )
        )
        return (f"{name} keys",)

    def _core(self, name: str, sources: tuple[str, ...]) -> str:
        """Fused attention; beside its output it keeps 4 bytes for each head and token."""
        shape, load = self.shape, self.load
        heads = max(1, shape.heads // self.degrees.tensor)
        width = heads * shape.head_dim
        seen = load.context if name == "cross" else load.tokens
        rows = self.context_tokens
        flops = 4 * rows * max(1, seen) * width // (2 if shape.causal and name != "cross" else 1)
        keys = self.key_width * max(1, load.sequences * seen)
        read = (rows * width + keys) * ITEM_BYTES
        out = rows * width * ITEM_BYTES + rows * heads * 4
        self.steps.append(
            LayerStep(
                name=name,
                forward=_attention(flops, read, out, load.sequences * heads, rows // max(1, load.sequences)),
                reads=sources,
                writes=f"{name} core",
                num_bytes=out,
                backward=(
                    _attention(
                        flops * 5 // 2, 2 * read + 2 * out, read, load.sequences * heads, rows // max(1, load.sequences)
                    ),
                ),
                saved=(*(one for one in sources if not one.endswith(" keys")), f"{name} core"),
            )
        )
        return f"{name} core"


def _product(m: int, n: int, k: int) -> Operator:
    return Operator(
        name="aten.mm",
        kind=OperatorKind.MATMUL,
        dtype=_DTYPE,
        flops=2 * m * n * k,
        read_bytes=(m * k + k * n) * ITEM_BYTES,
        written_bytes=m * n * ITEM_BYTES,
        gemm=Gemm(m=m, n=n, k=k),
    )


def _attention(flops: int, read: int, written: int, batch: int, rows: int) -> Operator:
    return Operator(
        name="aten._scaled_dot_product_flash_attention",
        kind=OperatorKind.ATTENTION,
        dtype=_DTYPE,
        flops=flops,
        read_bytes=read,
        written_bytes=written,
        gemm=Gemm(batch=max(1, batch), m=max(1, rows), n=128, k=0),
    )


def _memory(name: str, read: int, written: int) -> Operator:
    return Operator(name=name, kind=OperatorKind.MEMORY, dtype=_DTYPE, flops=0, read_bytes=read, written_bytes=written)


def write_first(writer: StepWriter) -> str:
    """Writes what is before the first layer: the projection of patches, or the lookup of tokens."""
    shape = writer.shape
    if shape.patch:
        return writer.product("patches", "raw", shape.patch, shape.hidden, rows=writer.own_tokens, is_first=True)
    if not shape.vocabulary:
        return "x"
    num_bytes = writer.own_bytes
    writer.steps.append(
        LayerStep(
            name="lookup",
            forward=_memory("lookup", num_bytes, num_bytes),
            reads=(),
            writes="looked up",
            num_bytes=num_bytes,
            backward=(),
            weights=(_memory("lookup backward", 2 * num_bytes, num_bytes),),
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
            forward=_memory("cross entropy", 3 * single_bytes, single_bytes),
            reads=("logits",),
            writes="softmax",
            num_bytes=single_bytes,
            backward=(_memory("cross entropy backward", single_bytes, single_bytes // 2),),
            saved=("softmax",),
        )
    )
    return "softmax"


def write_projector(writer: StepWriter, source: str, width: int) -> str:
    """Writes one product to the width of who reads the output; where tokens are merged, of so many side by side."""
    tokens = writer.load.outputs or writer.load.tokens
    rows = max(1, -(-writer.load.sequences * tokens // (writer.degrees.tensor * writer.degrees.context)))
    return writer.product("projector", source, projected_width(writer.shape, writer.load), width, rows=rows)


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
