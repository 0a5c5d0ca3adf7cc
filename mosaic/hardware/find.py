"""Devices and clusters by name (from ``devices.toml``) or from a user's JSON file."""

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
"""The unused link of a single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterFile(StrictFile):
    """A cluster in a user's file, with the device by name or as a full description."""

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
    """A full node of described devices; the host has this machine's cores and memory."""
    node = parse(Cluster, json.dumps(_described()[name]), source=f"devices.toml: {name}")
    return node if name != "host" else dataclasses.replace(node, hardware=_this_machine(node.hardware))


def available_cores() -> tuple[int, ...]:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def machine_bytes() -> int:
    """Returns this machine's memory in bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not POSIX
        return 0


def _this_machine(core: Hardware) -> Hardware:
    cores = len(available_cores())
    peaks = {name: cores * getattr(core, name) for name in ("bf16_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops")}
    return dataclasses.replace(core, num_sms=cores, memory_bytes=machine_bytes() or core.memory_bytes, **peaks)


def find_hardware(where: str) -> Hardware:
    """Returns a device by name, or from the file if ``where`` ends in ``.json``.

    Raises:
        ValueError: The device is unknown.
        InvalidFileError: The file is missing or not JSON, or a field is missing, unknown, zero, negative, infinite or
            NaN; the message has the line and the field.
    """
    if where.endswith(".json"):
        return load(Hardware, Path(where))
    if where not in HARDWARE_NAMES:
        raise ValueError(f"{unknown('device', where, HARDWARE_NAMES)}, or a description in a .json file")
    return _usual_node(where).hardware


def hardware_of(device: Device) -> Hardware | None:
    """Returns the description of a device by its product name, or None."""
    if device.kind == "host":
        return find_hardware("host")
    words = device.name.lower().replace("-", " ").split()
    return next((find_hardware(name) for name in HARDWARE_NAMES if name.split("-")[0] in words), None)


def find_cluster(where: str, gpus: int | None = None) -> Cluster:
    """Returns a cluster from a file, or ``gpus`` devices of a name with their usual nodes and links.

    Args:
        where: Name of a device, or a .json file with a device or a cluster: nodes, devices per node, links, and a
            device by name or as a full description.
        gpus: Number of devices; by default 1, or the file's number.

    Raises:
        MosaicError: The device is unknown, ``gpus`` does not fill whole nodes or differs from the file's number, or a
            file describes one device without links.
        InvalidFileError: See ``find_hardware``.
        ValueError: ``gpus`` is below 1.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus={gpus}; use at least 1")
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
            raise MosaicError(f"gpus={gpus}, but {where} describes {cluster.num_devices} devices; leave out the number")
        return cluster
    hardware = find_hardware(where)
    if count > 1:
        raise MosaicError(
            f"{where} describes one device without links; describe the cluster: hardware, nodes, gpus_per_node, "
            "nics_per_node, intra_node and inter_node"
        )
    return Cluster(hardware=hardware, intra_node=NOWHERE, inter_node=NOWHERE)
