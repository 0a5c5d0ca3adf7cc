"""Laws of predicted times and counted memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mosaic.cost.counts import Operator, OperatorKind, PhaseCounts
from mosaic.cost.roofline import operator_ms, phase_bandwidth, phase_ms
from mosaic.hardware import Hardware, find_hardware

HARDWARE = st.sampled_from([find_hardware(name) for name in ("a100-80g", "h100-80g", "h200", "h800", "a40", "host")])


@st.composite
def operators(draw: st.DrawFn) -> Operator:
    kind = draw(st.sampled_from(OperatorKind))
    return Operator(
        name="aten.x",
        kind=kind,
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float64", "int64"])),
        flops=draw(st.integers(0, 10**14)),
        read_bytes=draw(st.integers(0, 10**11)),
        written_bytes=draw(st.integers(0, 10**11)),
        kernels=draw(st.integers(0, 4)),
        calls=draw(st.integers(1, 20)),
    )


PHASES = st.builds(PhaseCounts, operators=st.lists(operators(), max_size=4).map(tuple))


@given(operators(), HARDWARE, st.data())
def test_more_sms_never_take_longer(operator: Operator, hardware: Hardware, data: st.DataObject):
    few = data.draw(st.integers(1, hardware.num_sms))
    more = data.draw(st.integers(few, hardware.num_sms))
    slow, fast = (operator_ms(operator, hardware, num_sms) for num_sms in (few, more))
    assert 0 <= fast <= slow * (1 + 1e-12)


@given(PHASES, HARDWARE)
def test_bandwidth_is_between_zero_and_one(phase: PhaseCounts, hardware: Hardware):
    for quota in (1, hardware.num_slots):
        assert 0 <= phase_bandwidth(phase, hardware, quota * hardware.sms_per_slot) <= 1


@given(PHASES, HARDWARE, st.randoms())
def test_the_end_of_a_line_lies_between_the_slower_clock_and_both_and_is_that_of_a_simulated_one(
    phase: PhaseCounts, hardware: Hardware, dice: random.Random
):
    end, device_ms = phase_ms(phase, hardware, hardware.num_sms), 0.0
    for operator in phase.operators:
        device_ms += operator.calls * operator_ms(operator, hardware, hardware.num_sms)
    launch_ms = phase.kernels * hardware.launch_us / 1e3
    assert max(launch_ms, device_ms) <= end * (1 + 1e-9)
    assert end <= (launch_ms + device_ms) * (1 + 1e-9)
    kernels = [
        operator_ms(operator, hardware, hardware.num_sms) / operator.kernels
        for operator in phase.operators
        for _ in range(operator.calls * operator.kernels)
    ]
    if any(not operator.kernels for operator in phase.operators):
        return
    if hardware.kind == "host" or not kernels:
        return
    dice.shuffle(kernels)
    end_ms = 0.0
    for place, kernel_ms in enumerate(kernels, 1):
        end_ms = max(end_ms, place * hardware.launch_us / 1e3) + kernel_ms
    assert abs(end_ms - end) <= min(launch_ms, device_ms) * (1 + 1e-9) + max(kernels)
