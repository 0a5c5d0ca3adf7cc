"""SMs that are kept free of modules, so that collectives do not take theirs.

A collective on a GPU is a kernel: NCCL runs a CTA for each channel, and each takes an SM as long as it runs. Held to
a number of CTAs (``max_ctas`` of its communicator) on a device with as many SMs that no module has, it finds these free
and takes nothing. A Hopper device has four such SMs anyway: 132 are 16 slots of 8, and 4 left over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mosaic.device import Device
from mosaic.plan import Plan

CommunicationSlots = int | Literal["remainder"]
"""Slots of each device that are left to communication, or only the SMs that the split into slots leaves over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What is left to communication."""

    slots: int = 0
    """The last slots of each device."""
    sms: int = 0
    """SMs that a collective is held to; 0: it takes what it likes."""

    @staticmethod
    def of(device: Device, communication_slots: CommunicationSlots) -> Reserved:
        """Works out the SMs; a slot brings the device's remainder with it.

        Raises:
            ValueError: There is no remainder, or no slot would be left for modules.
        """
        if communication_slots == "remainder":
            if not device.remainder_sms:
                raise ValueError(
                    f"{device.name} has no SMs left over by its {device.num_slots} slots; reserve a slot instead: "
                    "communication_slots=1"
                )
            return Reserved(sms=device.remainder_sms)
        if not 0 <= communication_slots < device.num_slots:
            raise ValueError(
                f"communication_slots={communication_slots} of {device.num_slots} slots of {device.name}; modules need "
                "at least one of them, and none may be negative"
            )
        if communication_slots == 0:
            return Reserved()
        return Reserved(slots=communication_slots, sms=communication_slots * device.sms_per_slot + device.remainder_sms)

    def left_of(self, device: Device) -> Device:
        """Returns the device that modules are planned for."""
        return replace(device, num_slots=device.num_slots - self.slots) if self.slots else device

    def told(self, plan: Plan, device: Device) -> Plan:
        """Returns a plan that was made for what is left, as one for the whole device that says what is reserved."""
        return replace(plan, device=device, communication_slots=self.slots, communication_sms=self.sms)
