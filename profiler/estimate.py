"""Bandwidth that modules use, from counted bytes: stands in where counters cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mosaic.cost.analytic import count_module
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_bandwidth
from mosaic.device import Device
from mosaic.errors import UnsupportedModelError
from mosaic.hardware import HARDWARE_NAMES, Hardware, find_hardware
from mosaic.profile import Phase
from mosaic.profiler.subject import Subject

_LOG = logging.getLogger("mosaic")


class CountedBandwidths:
    """Analytic shares of bandwidth (a ``BandwidthEstimate``): bytes moved over predicted time.

    A module that could not be counted is taken to use as large a share as it has of the slots.
    """

    source = "analytic"

    def __init__(self, counts: Mapping[str, ModuleCounts], device: Device, hardware: Hardware | None) -> None:
        """Takes counts by module; without a description of the device all modules count as uncounted."""
        self._counts = dict(counts)
        self._device = device
        self._hardware = hardware

    def knows(self, module: str) -> bool:
        """Returns whether a module was counted for a described device."""
        return module in self._counts and self._hardware is not None

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone uses, 0 to 1, at any degree."""
        if module not in self._counts or self._hardware is None:
            return self._device.fraction(quota)
        num_sms = max(1, round(self._device.fraction(quota) * self._hardware.num_sms))
        return phase_bandwidth(self._counts[module].phase(phase), self._hardware, num_sms)


def estimate_bandwidths(
    subjects: Sequence[Subject], device: Device, counted: Mapping[str, ModuleCounts] | None = None
) -> CountedBandwidths:
    """Counts modules on tensors without data, but for those that were ``counted``; nothing runs on the device."""
    counts = dict(counted or {})
    for subject in subjects:
        if subject.name in counts:
            continue
        try:
            counts[subject.name] = count_module(
                subject.module, subject.args, subject.kwargs, target=device.kind, settings=subject.settings
            )
        except UnsupportedModelError as error:
            _LOG.info("%s", error)
    return CountedBandwidths(counts, device, hardware_of(device))


def hardware_of(device: Device) -> Hardware | None:
    """Returns the description of a device that is in the catalogue, found by its product name; None for others."""
    if device.kind == "host":
        return find_hardware("host")
    words = device.name.lower().replace("-", " ").split()
    return next((find_hardware(name) for name in HARDWARE_NAMES if name.split("-")[0] in words), None)
