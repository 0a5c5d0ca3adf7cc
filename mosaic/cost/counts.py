"""Operators, floating-point operations and bytes of a module, whatever runs it. Plain data, without torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mosaic.profile import Phase


class OperatorKind(StrEnum):
    """The resource that bounds an operator, and so the efficiency that applies."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONV = "conv"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, or several equal ones; figures are of one call."""

    name: str
    """As torch's dispatcher calls it, such as ``aten.mm``."""
    kind: OperatorKind
    dtype: str
    """Of its result, such as ``bfloat16``."""
    flops: int
    """Operations of products, convolutions and attention; a multiplication and an addition are two."""
    read_bytes: int
    """Bytes of its inputs."""
    written_bytes: int
    """Bytes of its results."""
    kernels: int = 1
    """Kernels that it launches."""
    calls: int = 1

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCounts:
    """All operators of one phase, equal ones together, in the order of their first call; sums are over all calls."""

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
    """Bytes that a module takes on each of its devices."""

    parameter_bytes: int
    """Parameters, each once however often it is used."""
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    """Gradients of the parameters that train."""
    optimizer_bytes: int = 0
    """State of the optimizer, and master weights where there are any."""
    activation_bytes: int = 0
    """Kept from forward to backward: storages saved by autograd that are neither parameters nor buffers."""
    forward_peak_bytes: int = 0
    """Most of activations and temporaries alive at once in forward."""
    backward_peak_bytes: int = 0
    """Most of activations and temporaries alive at once in backward, parameters' gradients not counted."""

    @property
    def workspace_bytes(self) -> int:
        """Temporaries at their peak, above the activations kept."""
        return max(0, max(self.forward_peak_bytes, self.backward_peak_bytes) - self.activation_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay from step to step."""
        return self.parameter_bytes + self.buffer_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak."""
        return self.resident_bytes + self.activation_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCounts:
    """Everything counted about one module at one batch size."""

    batch: int = 0
    """Samples in the batch that was counted; 0 where its inputs do not show one."""
    forward: PhaseCounts
    backward: PhaseCounts
    """Backward; empty for a module that takes no gradient. Recomputation of checkpoints is counted here."""
    memory: MemoryCounts
    result_bytes: int = 0
    """Bytes of the results of a call."""
    result_gradient_bytes: int = 0
    """Bytes of those results that take a gradient."""

    def phase(self, phase: Phase) -> PhaseCounts:
        return self.forward if phase is Phase.FORWARD else self.backward


def main_dtype(counts: Iterable[ModuleCounts]) -> str:
    """Returns the dtype of most of the operations of products and attention; ``none`` where there are none."""
    flops: Counter[str] = Counter()
    for module in counts:
        for operator in (*module.forward.operators, *module.backward.operators):
            if operator.kind in (OperatorKind.MATMUL, OperatorKind.ATTENTION, OperatorKind.CONV):
                flops[operator.dtype] += operator.flops * operator.calls
    return max(flops, key=lambda dtype: flops[dtype], default="none")


def merge_equal(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Returns operators with equal ones put together, in the order of their first call."""
    calls: Counter[Operator] = Counter()
    for operator in operators:
        calls[dataclasses.replace(operator, calls=1)] += operator.calls
    return tuple(dataclasses.replace(operator, calls=count) for operator, count in calls.items())
