"""The time of counted operators on a described device: the analytic model of PipeWeaver's SEMU (section 4.1).

A kernel takes max(FLOPs / (alpha F), bytes / (alpha B)), with one efficiency alpha for each kind of operator, and some
time before it begins to work. F shrinks with the SMs of a partition. B does not shrink until too
few SMs are left to draw all of it. Traffic of neighbours is the interference model's matter.

On a GPU two clocks run as in a line of two stages: one thread of the host launches kernel after kernel, and each kernel
begins when it was launched and the kernel before it has ended. On the host an operator is called and then works: one
clock. A time never rises with the SMs, because none of its parts does.
"""

from __future__ import annotations

from mosaic.cost.counts import Operator, OperatorKind, PhaseCounts
from mosaic.hardware import Hardware


def operator_ms(operator: Operator, hardware: Hardware, num_sms: int) -> float:
    """Returns the device's time of one call on ``num_sms`` SMs, in milliseconds."""
    work_ms = operator.moved_bytes / (hardware.bandwidth_gb_per_s(num_sms) * hardware.efficiency.memory) / 1e6
    if operator.flops:
        is_conv = operator.kind is OperatorKind.CONV
        is_vector = operator.kind is OperatorKind.MEMORY
        peak = hardware.fp32_tflops if is_vector else hardware.peak_tflops(operator.dtype, is_conv=is_conv)
        reached: float = getattr(hardware.efficiency, operator.kind)
        work_ms = max(work_ms, operator.flops / (peak * num_sms / hardware.num_sms * reached) / 1e9)
    return work_ms + operator.kernels * hardware.kernel_us / 1e3


def phase_ms(counts: PhaseCounts, hardware: Hardware, num_sms: int) -> float:
    """Returns the time of all operators of a phase on ``num_sms`` SMs, launches included, in milliseconds.

    On a GPU exact if all kernels are alike, and close if kernels of each kind are spread over the phase, as layers
    repeat: then launcher or device paces all of the phase except for the first launch or the last kernel.
    """
    device_ms = sum(operator.calls * operator_ms(operator, hardware, num_sms) for operator in counts.operators)
    kernels = counts.kernels
    launch_ms = kernels * hardware.launch_us / 1e3
    if hardware.kind == "host" or kernels == 0:
        return launch_ms + device_ms
    return max(launch_ms + device_ms / kernels, launch_ms / kernels + device_ms)


def phase_bandwidth(counts: PhaseCounts, hardware: Hardware, num_sms: int) -> float:
    """Returns the share of the device's memory bandwidth that a phase draws on average, between 0 and 1.

    It is rounded to nine digits and so does not fall from one quota to the next by the rounding of equal times: the
    exact search is slower where it falls.
    """
    time_ms = phase_ms(counts, hardware, num_sms)
    if time_ms <= 0:
        return 0.0
    return round(min(1.0, counts.moved_bytes / time_ms / 1e6 / hardware.memory_gb_per_s), 9)
