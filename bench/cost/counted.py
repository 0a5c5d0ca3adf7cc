"""The bandwidth that modules use, from counted bytes, where no counters tell it."""

from __future__ import annotations

from collections.abc import Mapping

from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_bandwidth
from mosaic.device import Device
from mosaic.hardware import Hardware
from mosaic.profile import Phase


class CountedBandwidths:
    """Analytic shares of bandwidth: bytes moved over predicted time.

    A module that could not be counted is taken to use as large a share as it has of the slots.
    """

    def __init__(self, counts: Mapping[str, ModuleCounts], device: Device, hardware: Hardware | None) -> None:
        """Takes counts by module; without a description of the device all modules count as uncounted."""
        self._counts = dict(counts)
        self._device = device
        self._hardware = hardware

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone uses, 0 to 1, at any degree."""
        if module not in self._counts or self._hardware is None:
            return self._device.fraction(quota)
        num_sms = max(1, round(self._device.fraction(quota) * self._hardware.num_sms))
        return phase_bandwidth(self._counts[module].phase(phase), self._hardware, num_sms)
