"""Counted operators of modules: shapes of their surfaces before they are measured."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from mosaic.cost.analytic import count_degrees
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.surfaces.shape_prior import shape_of
from mosaic.device import Device
from mosaic.errors import UnsupportedModelError
from mosaic.hardware import HARDWARE_NAMES, Hardware, find_hardware
from mosaic.profiler.machine.communication import Network
from mosaic.profiler.subject import Subject
from mosaic.shape import ModuleShape

MIN_SLOTS = 4
"""On a device of fewer slots, little lies between samples."""

_LOG = logging.getLogger("mosaic")

Counted = Mapping[str, Mapping[int, ModuleCounts]]
"""By module and degree."""


def count_subjects(subjects: Sequence[Subject], device: Device, degrees: Sequence[int]) -> Counted:
    """Counts modules on tensors without data; those that cannot be counted are left out, which is logged."""
    found = {}
    for subject in subjects:
        try:
            found[subject.name] = count_degrees(
                subject.module,
                subject.args,
                subject.kwargs,
                degrees=degrees,
                target=device.kind,
                settings=subject.settings,
            )
        except UnsupportedModelError as error:
            _LOG.info("%s", error)
    return found


def shapes_of(
    counted: Counted,
    device: Device,
    *,
    network: Network | None = None,
    gradient_bytes: Mapping[str, int] | None = None,
) -> dict[str, ModuleShape]:
    """Returns the shapes of counted modules; none for a device that is not in the catalogue, or of few slots.

    Args:
        counted: What was counted.
        device: Where they run.
        network: Adds to backwards of higher degrees what summing gradients takes, as composed samples do; without, as
            they are measured.
        gradient_bytes: What each module sums; needed with ``network``.
    """
    hardware = described(device)
    if hardware is None or device.num_slots < MIN_SLOTS:
        return {}
    quotas = range(1, device.num_slots + 1)
    found = {}
    for name, by_degree in counted.items():
        reduce_ms = None
        if network is not None and gradient_bytes is not None:
            reduce_ms = {
                degree: network.all_reduce_ms(gradient_bytes[name], degree) for degree in by_degree if degree > 1
            }
        shape = shape_of(name, by_degree, hardware, quotas, reduce_ms=reduce_ms)
        if shape is not None:
            found[name] = shape
    return found


def described(device: Device) -> Hardware | None:
    """Returns the catalogue's description with the slots that the device really has; None where there is none."""
    hardware = hardware_of(device)
    if hardware is None:
        return None
    num_sms = device.num_slots * device.sms_per_slot + device.remainder_sms
    peaks = ("bf16_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops")
    scaled = {name: getattr(hardware, name) * num_sms / hardware.num_sms for name in peaks}
    return dataclasses.replace(hardware, num_sms=num_sms, sms_per_slot=device.sms_per_slot, **scaled)


def hardware_of(device: Device) -> Hardware | None:
    """Returns the description of a device that is in the catalogue, found by its product name; None for others."""
    if device.kind == "host":
        return find_hardware("host")
    words = device.name.lower().replace("-", " ").split()
    return next((find_hardware(name) for name in HARDWARE_NAMES if name.split("-")[0] in words), None)
