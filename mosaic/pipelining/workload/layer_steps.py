"""Steps of a layer: one operation each, with the kernels and the messages of all phases."""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.cost.counts import Operator, OperatorKind
from mosaic.pipelining.semu.rank_hardware import Collective, Exchange

ITEM_BYTES = 2
"""Bytes of a number in bfloat16."""
_DTYPE = "bfloat16"

LayerWork = Operator | Collective | Exchange
"""What a step does: a kernel, or what travels between peers."""


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
class Fetched:
    """Keys and values of other context ranks, one group of heads after the other."""

    groups: int
    """Groups of heads; the step's operators have a call for each."""
    fetch: Collective | Exchange
    """Brings those of one group, in forward and again in backward."""
    give_back: Collective | Exchange
    """Sums the gradients of one group at their owners, in 32 bits."""
    num_bytes: int
    """Of a group's keys and values, in memory."""
    received_bytes: int
    """Those of them that come from other ranks, to the rank that receives most."""
    gradient_bytes: int
    """Of a group's gradients."""


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
    fetched: Fetched | None = None
    """What an attention needs of other ranks, beside what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The input of a product."""

    tensor: str
    """What the product reads."""
    kept: str
    """What its weights' gradients are computed from: the same, or what it was gathered from."""
    again: Collective | None = None
    """Gathers it once more for them."""


def product_of(m: int, n: int, k: int) -> Operator:
    """Returns the product of (m, k) and (k, n)."""
    return Operator(
        name="aten.mm",
        kind=OperatorKind.MATMUL,
        dtype=_DTYPE,
        flops=2 * m * n * k,
        read_bytes=(m * k + k * n) * ITEM_BYTES,
        written_bytes=m * n * ITEM_BYTES,
    )


def attention_of(flops: int, read: int, written: int, batch: int, rows: int, calls: int = 1) -> Operator:
    """Returns calls of fused attention; ``batch`` heads of all sequences with ``rows`` queries each."""
    return Operator(
        name="aten._scaled_dot_product_flash_attention",
        kind=OperatorKind.ATTENTION,
        dtype=_DTYPE,
        flops=flops,
        read_bytes=read,
        written_bytes=written,
        calls=calls,
    )


def memory_of(name: str, read: int, written: int) -> Operator:
    """Returns a kernel that reads and writes."""
    return Operator(name=name, kind=OperatorKind.MEMORY, dtype=_DTYPE, flops=0, read_bytes=read, written_bytes=written)
