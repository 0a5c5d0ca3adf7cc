"""Devices at their best, and the links between them: enough to plan for hardware that is not here."""

from mosaic.hardware.cluster import Cluster
from mosaic.hardware.description import Efficiency, Hardware
from mosaic.hardware.find import (
    HARDWARE_NAMES,
    find_cluster,
    find_hardware,
    hardware_of,
    load_cluster,
    load_hardware,
)
from mosaic.hardware.link import Link, Message

__all__ = [
    "HARDWARE_NAMES",
    "Cluster",
    "Efficiency",
    "Hardware",
    "Link",
    "Message",
    "find_cluster",
    "find_hardware",
    "hardware_of",
    "load_cluster",
    "load_hardware",
]
