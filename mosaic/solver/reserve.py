"""Slots without modules, for collectives.

A collective on a GPU is a kernel: NCCL runs a CTA for each channel, and each occupies an SM while it runs. Held to a
number of CTAs (``max_ctas`` of its communicator) on a device with as many SMs that no module has, it takes none of
theirs. A reserved slot includes the SMs that the split into slots leaves over: of a Hopper device's 132 SMs, 16 slots
of 8, that is 4.
"""

from __future__ import annotations

from dataclasses import replace

from mosaic.device import Device
from mosaic.plan import Plan


def reserved_sms(device: Device, slots: int) -> int:
    """Returns the SMs that a collective is held to; 0: not limited."""
    return slots * device.sms_per_slot + device.remainder_sms if slots else 0


def without_reserved(device: Device, slots: int) -> Device:
    """Returns the device that modules are planned for: without its last ``slots`` slots.

    Raises:
        ValueError: No slot is left for modules.
    """
    if not 0 <= slots < device.num_slots:
        raise ValueError(
            f"communication_slots={slots} of {device.num_slots} slots of {device.name}; modules need at least one of "
            "them, and none may be negative"
        )
    return replace(device, num_slots=device.num_slots - slots) if slots else device


def with_reserved(plan: Plan, device: Device, slots: int) -> Plan:
    """Returns a plan for the device without reserved slots as one for the whole device that reserves them."""
    return replace(plan, device=device, communication_slots=slots, communication_sms=reserved_sms(device, slots))
