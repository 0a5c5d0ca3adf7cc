"""Steps of a layer: one operation each, with the kernels and the messages of all phases."""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.cost.counts import Operator, OperatorKind
from mosaic.pipelining.semu.rank_hardware import Collective, Exchange

ITEM_BYTES = 2
"""Bytes of a number in bfloat16."""
_DTYPE = "bfloat16"

LayerWork = Operator | Collective | Exchange
"""Work of a step: a kernel, or messages between peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoad:
    """Input sizes of a module."""

    sequences: int
    """Number of equally long sequences; attention stays within each."""
    tokens: int
    """Tokens of each sequence."""
    context: int = 0
    """Tokens of another module that each sequence attends to."""
    outputs: int = 0
    """Output tokens of each sequence if they are merged before a projector; 0: as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Keys and values of other context ranks, one group of heads after the other."""

    groups: int
    """Groups of heads; the step's operators have a call for each."""
    fetch: Collective | Exchange
    """Fetches one group, in forward and again in backward."""
    give_back: Collective | Exchange
    """Sums the gradients of one group at their owners, in 32 bits."""
    num_bytes: int
    """Bytes of a group's keys and values in memory."""
    received_bytes: int
    """Bytes of them from other ranks, for the rank that receives most."""
    gradient_bytes: int
    """Bytes of a group's gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """One operation of a layer, in all phases."""

    name: str
    """Name in its layer."""
    forward: LayerWork
    reads: tuple[str, ...]
    """Input tensors."""
    writes: str
    """Output tensor."""
    num_bytes: int
    """Bytes of the output on this rank."""
    backward: tuple[LayerWork, ...]
    """Backward for its inputs."""
    weights: tuple[Operator, ...] = ()
    """Backward for its weights."""
    again: Collective | None = None
    """Second gather of its input, for the weights' gradients."""
    saved: tuple[str, ...] = ()
    """Tensors that its backward, or with weights their gradients, read."""
    fetched: Fetched | None = None
    """Keys and values that an attention fetches from other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The input of a product."""

    tensor: str
    """Input of the product."""
    kept: str
    """Input of its weights' gradients: the same, or its part before the gather."""
    again: Collective | None = None
    """Second gather, for the weights' gradients."""


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
