"""How long counted operators take on a described device: the analytic model of PipeWeaver's SEMU (section 4.1).

An operator takes max(FLOPs / (alpha F), bytes / (alpha B), network / (alpha N)) plus a fixed time for each kernel.
F and B are those of the SMs that a partition has:

* F shrinks with the SMs. Matrix products are cut into tiles of which each SM takes one at a time, so the last wave
  leaves SMs idle (wave quantisation); the best of three tile sizes and splits of the sum is taken, as libraries do.
* B does not shrink until too few SMs are left to draw all of it. What neighbours draw at the same time is not known
  here; it is the interference model's matter.

A time never rises with the SMs, because each of its parts never does.
"""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.cost.counts import Gemm, Operator, OperatorKind, PhaseCounts
from mosaic.hardware import Hardware

_TILES = ((128, 128, 1.0), (64, 64, 0.7), (32, 32, 0.35))
"""Rows and columns of the tiles to choose from, and the share of the arithmetic rate that each reaches: smaller tiles
read each element more often. Round figures of ours."""

_SPLITS = (1, 2, 4, 8)
"""Parts into which the sum may be cut (split-K)."""

_MIN_SPLIT = 256
"""Length of the sum that each part keeps at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealTime:
    """Parts of one call's time with every efficiency at 1, in milliseconds."""

    compute_ms: float
    """Arithmetic, waves included."""
    memory_ms: float
    """Memory."""
    network_ms: float
    """Links."""


def ideal_time(
    operator: Operator, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0, with_waves: bool = True
) -> IdealTime:
    """Returns the parts of an operator's time on ``num_sms`` SMs; without waves, arithmetic is spread evenly.

    Raises:
        ValueError: The operator sends to other devices and there is no link.
    """
    if operator.network_bytes and network_gb_per_s <= 0:
        raise ValueError(f"{operator.name} sends {operator.network_bytes} bytes to other devices; give a link")
    if operator.kind in (OperatorKind.MEMORY, OperatorKind.NETWORK):
        peak = hardware.fp32_tflops
    else:
        peak = hardware.peak_tflops(operator.dtype, is_conv=operator.kind is OperatorKind.CONV)
    share = num_sms / hardware.num_sms
    compute = operator.flops / (peak * share) / 1e9
    if with_waves and operator.gemm is not None and hardware.kind == "cuda" and operator.flops:
        compute *= wave_factor(operator.gemm, num_sms)
    return IdealTime(
        compute_ms=compute,
        memory_ms=operator.moved_bytes / hardware.bandwidth_gb_per_s(num_sms) / 1e6,
        network_ms=operator.network_bytes / network_gb_per_s / 1e6 if operator.network_bytes else 0.0,
    )


def wave_factor(gemm: Gemm, num_sms: int) -> float:
    """Returns how much longer tiles in whole waves take than the same arithmetic spread evenly over the SMs.

    At least 1. Tiles that stick out over the edge of the result count whole.
    """
    best = float("inf")
    area = max(1, gemm.m * gemm.n)
    for rows, columns, rate in _TILES:
        grid = -(-gemm.m // rows) * -(-gemm.n // columns)
        padding = grid * rows * columns / area
        for parts in _SPLITS:
            if parts > 1 and gemm.k < parts * _MIN_SPLIT:
                break
            tiles = max(1, gemm.batch * grid * parts)
            waves = -(-tiles // num_sms)
            best = min(best, padding / rate * waves * num_sms / tiles)
    return max(1.0, best)


def operator_ms(operator: Operator, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> float:
    """Returns the time of one call on ``num_sms`` SMs, in milliseconds; see the head of this file."""
    ideal = ideal_time(operator, hardware, num_sms, network_gb_per_s=network_gb_per_s)
    reached = hardware.efficiency
    compute, memory, network = efficiency_of(operator.kind, hardware), reached.memory, reached.network
    slowest = max(ideal.compute_ms / compute, ideal.memory_ms / memory, ideal.network_ms / network)
    return slowest + operator.kernels * hardware.launch_us / 1e3


def phase_ms(counts: PhaseCounts, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> float:
    """Returns the time of all operators of a phase one after the other on ``num_sms`` SMs, in milliseconds."""
    return sum(
        operator.calls * operator_ms(operator, hardware, num_sms, network_gb_per_s=network_gb_per_s)
        for operator in counts.operators
    )


def phase_bandwidth(counts: PhaseCounts, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> float:
    """Returns the share of the device's memory bandwidth that a phase draws on average, between 0 and 1."""
    time_ms = phase_ms(counts, hardware, num_sms, network_gb_per_s=network_gb_per_s)
    if time_ms <= 0:
        return 0.0
    return min(1.0, counts.moved_bytes / time_ms / 1e6 / hardware.memory_gb_per_s)


def efficiency_of(kind: OperatorKind, hardware: Hardware) -> float:
    """Returns the share of the arithmetic peak that operators of a kind reach."""
    reached = hardware.efficiency
    if kind is OperatorKind.MATMUL:
        return reached.matmul
    if kind is OperatorKind.ATTENTION:
        return reached.attention
    return reached.conv if kind is OperatorKind.CONV else reached.memory
