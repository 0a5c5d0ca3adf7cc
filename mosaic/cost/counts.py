"""Operators, FLOPs and bytes of a module on any device. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mosaic.profile import Phase


class OperatorKind(StrEnum):
    """The resource that bounds an operator and determines its efficiency."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONV = "conv"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, or several equal ones; values are per call."""

    name: str
    """Name in torch's dispatcher, such as ``aten.mm``."""
    kind: OperatorKind
    dtype: str
    """Of the result, such as ``bfloat16``."""
    flops: int
    """FLOPs of products, convolutions and attention; a multiply-add is two."""
    read_bytes: int
    """Bytes of its inputs."""
    written_bytes: int
    """Bytes of its results."""
    kernels: int = 1
    """Number of kernels that it launches."""
    calls: int = 1

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCounts:
    """All operators of one phase, equal ones merged, in the order of their first call; sums are over all calls."""

    operators: tuple[Operator, ...] = ()

    @property
    def flops(self) -> int:
        return sum(operator.flops * operator.calls for operator in self.operators)

    @property
    def moved_bytes(self) -> int:
        return sum(operator.moved_bytes * operator.calls for operator in self.operators)

    @property
    def kernels(self) -> int:
        return sum(operator.kernels * operator.calls for operator in self.operators)

    def of_kind(self, *kinds: OperatorKind) -> tuple[Operator, ...]:
        return tuple(operator for operator in self.operators if operator.kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Bytes of a module on each of its devices."""

    parameter_bytes: int
    """Parameters, each counted once."""
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    """Gradients of trainable parameters."""
    optimizer_bytes: int = 0
    """Optimizer state and master weights."""
    activation_bytes: int = 0
    """Storages saved by autograd for backward, except parameters and buffers."""
    forward_peak_bytes: int = 0
    """Peak of activations and temporaries in forward."""
    backward_peak_bytes: int = 0
    """Peak of activations and temporaries in backward, without parameter gradients."""

    @property
    def workspace_bytes(self) -> int:
        """Peak of temporaries above the saved activations."""
        return max(0, max(self.forward_peak_bytes, self.backward_peak_bytes) - self.activation_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes held between steps."""
        return self.parameter_bytes + self.buffer_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak."""
        return self.resident_bytes + self.activation_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCounts:
    """All counts of one module at one batch size."""

    batch: int = 0
    """Number of samples; 0 if the inputs have no batch dimension."""
    forward: PhaseCounts
    backward: PhaseCounts
    """Backward, including recomputation in checkpoints; empty for a module without gradients."""
    memory: MemoryCounts
    result_bytes: int = 0
    """Bytes of a call's results."""
    result_gradient_bytes: int = 0
    """Bytes of differentiable results."""

    def phase(self, phase: Phase) -> PhaseCounts:
        return self.forward if phase is Phase.FORWARD else self.backward


def main_dtype(counts: Iterable[ModuleCounts]) -> str:
    """Returns the dtype of most FLOPs of products and attention; ``none`` if there are none."""
    flops: Counter[str] = Counter()
    for module in counts:
        for operator in (*module.forward.operators, *module.backward.operators):
            if operator.kind in (OperatorKind.MATMUL, OperatorKind.ATTENTION, OperatorKind.CONV):
                flops[operator.dtype] += operator.flops * operator.calls
    return max(flops, key=lambda dtype: flops[dtype], default="none")


def merge_equal(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Returns operators with equal ones merged, in the order of their first call."""
    calls: Counter[Operator] = Counter()
    for operator in operators:
        calls[dataclasses.replace(operator, calls=1)] += operator.calls
    return tuple(dataclasses.replace(operator, calls=count) for operator, count in calls.items())
