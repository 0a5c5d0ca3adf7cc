"""How long counted operators take on a described device: the analytic model of PipeWeaver's SEMU (section 4.1).

A kernel takes max(FLOPs / (alpha F), bytes / (alpha B), network / (alpha N)), and some time before it begins to work.
F and B are those of the SMs that a partition has:

* F shrinks with the SMs. Matrix products are cut into tiles of which each SM takes one at a time, so the last wave
  leaves SMs idle (wave quantisation); the best of three tile sizes and splits of the sum is taken, as libraries do. A
  tile is begun and ended beside its sum, which costs products with short sums most.
* B does not shrink until too few SMs are left to draw all of it. What neighbours draw at the same time is not known
  here; it is the interference model's matter.

So small kernels reach less of every peak. On a GPU there are two clocks, as in a line of two stages: one thread of the
host launches kernel after kernel, and each begins when it was launched and the one before it has ended. On the host an
operator is called and then works: one clock.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The two clocks of a phase, in milliseconds."""

    launch_ms: float
    """Of the thread that launches its kernels, or on the host calls its operators."""
    device_ms: float
    """Of the device, if all kernels were there from the start."""
    idle_ms: float
    """The part of that in which it begins kernels."""
    kernels: int
    """Kernels."""
    total_ms: float
    """From the first launch to the end of the last kernel."""

    @property
    def launch_share(self) -> float:
        """Part of the time in which no kernel works: the device waits for the launcher, or begins a kernel."""
        return (self.total_ms - self.device_ms + self.idle_ms) / self.total_ms if self.total_ms > 0 else 0.0


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
        compute *= wave_factor(operator.gemm, num_sms, hardware.ramp_of(operator.dtype))
    return IdealTime(
        compute_ms=compute,
        memory_ms=operator.moved_bytes / hardware.bandwidth_gb_per_s(num_sms) / 1e6,
        network_ms=operator.network_bytes / network_gb_per_s / 1e6 if operator.network_bytes else 0.0,
    )


def wave_factor(gemm: Gemm, num_sms: int, ramp_k: float = 0.0) -> float:
    """Returns how much longer tiles in whole waves take than the same arithmetic spread evenly over the SMs.

    At least 1. Tiles that stick out over the edge of the result count whole. Each takes ``ramp_k`` of its sum longer to
    begin and to end; where the sum's length is not known (0), as in attention, that is not counted.
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
            ramp = 1 + ramp_k * parts / gemm.k if gemm.k else 1.0
            best = min(best, padding / rate * ramp * waves * num_sms / tiles)
    return max(1.0, best)


def operator_ms(operator: Operator, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> float:
    """Returns the device's time of one call on ``num_sms`` SMs, in milliseconds; see the head of this file."""
    begun = operator.kernels * hardware.kernel_us / 1e3
    return _work_ms(operator, hardware, num_sms, network_gb_per_s) + begun


def _work_ms(operator: Operator, hardware: Hardware, num_sms: int, network_gb_per_s: float) -> float:
    ideal = ideal_time(operator, hardware, num_sms, network_gb_per_s=network_gb_per_s)
    reached = hardware.efficiency
    compute = ideal.compute_ms / efficiency_of(operator.kind, hardware)
    return max(compute, ideal.memory_ms / reached.memory, ideal.network_ms / reached.network)


def clocks_of(counts: PhaseCounts, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> Clocks:
    """Returns when launcher and device are done with all operators of a phase on ``num_sms`` SMs, begun together."""
    work_ms = sum(
        operator.calls * _work_ms(operator, hardware, num_sms, network_gb_per_s) for operator in counts.operators
    )
    kernels = counts.kernels
    launch_ms, idle_ms = kernels * hardware.launch_us / 1e3, kernels * hardware.kernel_us / 1e3
    device_ms = work_ms + idle_ms
    total_ms = launch_ms + device_ms if hardware.kind == "host" else line_ms(launch_ms, device_ms, kernels)
    return Clocks(launch_ms=launch_ms, device_ms=device_ms, idle_ms=idle_ms, kernels=kernels, total_ms=total_ms)


def line_ms(launch_ms: float, device_ms: float, kernels: int) -> float:
    """Returns the end of a line of two stages, in milliseconds: kernels are launched one by one, and run in that order.

    Exact where all kernels are alike, and close where calls of each kind are spread over the phase, as layers repeat:
    then launcher or device paces all of it, but for the first launch or the last kernel (CLIP and ImageBind, kernel
    after kernel in the order of their calls: within 1.2 % in each phase of each module). Where short kernels all come
    first it is too short, at most by the smaller of both clocks.
    """
    if kernels == 0:
        return device_ms
    return max(launch_ms + device_ms / kernels, launch_ms / kernels + device_ms)


def phase_ms(counts: PhaseCounts, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> float:
    """Returns the time of all operators of a phase on ``num_sms`` SMs, launches included, in milliseconds."""
    return clocks_of(counts, hardware, num_sms, network_gb_per_s=network_gb_per_s).total_ms


def phase_bandwidth(counts: PhaseCounts, hardware: Hardware, num_sms: int, *, network_gb_per_s: float = 0.0) -> float:
    """Returns the share of the device's memory bandwidth that a phase draws on average, between 0 and 1.

    To nine digits, so that it does not fall from one quota to the next by the rounding of equal times: the exact search
    needs a share that never does.
    """
    time_ms = phase_ms(counts, hardware, num_sms, network_gb_per_s=network_gb_per_s)
    if time_ms <= 0:
        return 0.0
    return round(min(1.0, counts.moved_bytes / time_ms / 1e6 / hardware.memory_gb_per_s), 9)


def efficiency_of(kind: OperatorKind, hardware: Hardware) -> float:
    """Returns the share of the arithmetic peak that operators of a kind reach."""
    reached = hardware.efficiency
    if kind is OperatorKind.MATMUL:
        return reached.matmul
    if kind is OperatorKind.ATTENTION:
        return reached.attention
    return reached.conv if kind is OperatorKind.CONV else reached.memory
