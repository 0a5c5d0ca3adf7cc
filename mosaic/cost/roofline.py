"""The time of counted operators on a described device, by the analytic model of PipeWeaver's SEMU (section 4.1).

A kernel takes max(FLOPs / (alpha F), bytes / (alpha B)) plus a start-up time, with one efficiency alpha per kind of
operator. F is proportional to the SMs of a partition. B is that of the device until the SMs are too few to saturate it.
Traffic of neighbours belongs to the interference model.

On a GPU, launcher and device form a pipeline of two stages: one host thread launches kernel after kernel, and a kernel
starts after its launch and after the previous kernel. On the host, call and work of an operator are sequential. A time
never increases with the SMs, because none of its terms does.
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

    On a GPU it is exact if all kernels are equal, and close if layers repeat: then either launcher or device limits the
    whole phase except for the first launch or the last kernel.
    """
    device_ms = sum(operator.calls * operator_ms(operator, hardware, num_sms) for operator in counts.operators)
    kernels = counts.kernels
    launch_ms = kernels * hardware.launch_us / 1e3
    if hardware.kind == "host" or kernels == 0:
        return launch_ms + device_ms
    return max(launch_ms + device_ms / kernels, launch_ms / kernels + device_ms)


def phase_bandwidth(counts: PhaseCounts, hardware: Hardware, num_sms: int) -> float:
    """Returns the average share of the device's memory bandwidth that a phase uses, between 0 and 1.

    Rounded to nine digits, because the exact search is slower if rounding errors make it decrease between quotas.
    """
    time_ms = phase_ms(counts, hardware, num_sms)
    if time_ms <= 0:
        return 0.0
    return round(min(1.0, counts.moved_bytes / time_ms / 1e6 / hardware.memory_gb_per_s), 9)
