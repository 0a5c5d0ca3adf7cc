"""Descriptions of devices and links, to plan for hardware without measuring it."""

from mosaic.hardware.description import Efficiency, Hardware
from mosaic.hardware.find import HARDWARE_NAMES, NOWHERE, find_cluster, find_hardware, hardware_of
from mosaic.hardware.network import Cluster, Link, Message

__all__ = [
    "HARDWARE_NAMES",
    "NOWHERE",
    "Cluster",
    "Efficiency",
    "Hardware",
    "Link",
    "Message",
    "find_cluster",
    "find_hardware",
    "hardware_of",
]
