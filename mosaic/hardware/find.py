"""Devices and clusters by name, from ``devices.toml`` beside this file, or from a user's JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from mosaic.artifact import Ge, StrictFile, load, parse
from mosaic.device import Device
from mosaic.errors import MosaicError, unknown
from mosaic.hardware.description import Hardware
from mosaic.hardware.network import Cluster, Link

HARDWARE_NAMES = ("a100-80g", "h100-80g", "h200", "h800", "a40", "host")
"""Names of the devices in ``devices.toml``."""
NOWHERE = Link(gb_per_s=1.0)
"""The link of one device, which sends nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterFile(StrictFile):
    """A cluster as a user's file has it, with the device by name or described in full."""

    schema_version: int = 1
    hardware: str | Hardware
    nodes: Annotated[int, Ge(1)]
    gpus_per_node: Annotated[int, Ge(1)]
    nics_per_node: Annotated[int, Ge(1)] | None = None
    intra_node: Link
    inter_node: Link


@cache
def _described() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("mosaic.hardware") / "devices.toml").read_text(encoding="utf-8"))


def _usual_node(name: str) -> Cluster:
    """A full node of described devices; the host has the cores and the memory of this machine."""
    node = parse(Cluster, json.dumps(_described()[name]), source=f"devices.toml: {name}")
    return node if name != "host" else dataclasses.replace(node, hardware=_this_machine(node.hardware))


def available_cores() -> tuple[int, ...]:
    """Returns the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def machine_bytes() -> int:
    """Returns the bytes of memory of this machine; 0 where unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return 0


def _this_machine(core: Hardware) -> Hardware:
    cores = len(available_cores())
    peaks = {name: cores * getattr(core, name) for name in ("bf16_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops")}
    return dataclasses.replace(core, num_sms=cores, memory_bytes=machine_bytes() or core.memory_bytes, **peaks)


def find_hardware(where: str) -> Hardware:
    """Returns a device by name, or from the file if ``where`` ends in ``.json``.

    Raises:
        ValueError: There is no device of that name.
        InvalidFileError: The file is missing, not JSON, has an unknown field, lacks one, or a figure is zero,
            negative, infinite or not a number; the message has the line and the field.
    """
    if where.endswith(".json"):
        return load(Hardware, Path(where))
    if where not in HARDWARE_NAMES:
        raise ValueError(f"{unknown('device', where, HARDWARE_NAMES)}, or a description in a .json file")
    return _usual_node(where).hardware


def hardware_of(device: Device) -> Hardware | None:
    """Returns the description of a device by its product name; None for a device without a description."""
    if device.kind == "host":
        return find_hardware("host")
    words = device.name.lower().replace("-", " ").split()
    return next((find_hardware(name) for name in HARDWARE_NAMES if name.split("-")[0] in words), None)


def find_cluster(where: str, gpus: int | None = None) -> Cluster:
    """Returns a cluster from a file, or ``gpus`` devices of a name in nodes and with links that are usual for them.

    Args:
        where: Name of a device, or a .json file with a device or a cluster: nodes, devices a node, links, and a device
            by name or described in full.
        gpus: Number of devices; by default 1, or all of the file's cluster.

    Raises:
        MosaicError: There is no device of that name, ``gpus`` does not fill whole nodes or is not the number in the
            file, or a file describes one device and its links are not known.
        InvalidFileError: See ``find_hardware``.
        ValueError: ``gpus`` is below 1.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus={gpus}; a cluster has at least one")
    count = gpus or 1
    if not where.endswith(".json"):
        find_hardware(where)  # refuses unknown names
        node = _usual_node(where)
        per_node = min(count, node.gpus_per_node)
        if count % per_node:
            raise MosaicError(
                f"{count} devices do not fill nodes of {per_node} {where}; use a multiple of {per_node}, or describe "
                "the cluster in a file"
            )
        return dataclasses.replace(node, nodes=count // per_node, gpus_per_node=per_node)
    if "nodes" in load(dict[str, Any], Path(where)):
        read = load(_ClusterFile, Path(where))
        hardware = find_hardware(read.hardware) if isinstance(read.hardware, str) else read.hardware
        fields = {entry.name: getattr(read, entry.name) for entry in dataclasses.fields(Cluster)}
        cluster = Cluster(**fields | {"hardware": hardware})
        if gpus not in (None, cluster.num_devices):
            raise MosaicError(f"{where} describes {cluster.num_devices} devices, not {gpus}; leave the number out")
        return cluster
    hardware = find_hardware(where)
    if count > 1:
        raise MosaicError(
            f"{where} describes one device and no links; describe the cluster: hardware, nodes, gpus_per_node, "
            "nics_per_node, intra_node and inter_node"
        )
    return Cluster(hardware=hardware, intra_node=NOWHERE, inter_node=NOWHERE)
