"""Devices and clusters by name, from ``devices.toml`` beside this file, or from a user's JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, load, parse
from mosaic.device import Device, StrictFile
from mosaic.errors import MosaicError, unknown
from mosaic.hardware.cluster import Cluster
from mosaic.hardware.description import Hardware
from mosaic.hardware.link import Link

HARDWARE_NAMES = ("a100-80g", "h100-80g", "h200", "h800", "a40", "host")
"""Names of the devices in ``devices.toml``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice(StrictFile):
    """A device with the nodes and links that are usual for it."""

    hardware: Hardware
    per_node: Annotated[int, Ge(1)]
    """Devices in a node."""
    nics: Annotated[int, Ge(1)]
    """NICs in a node."""
    intra_node: Link
    """Link of a device to the others of its node."""
    inter_node: Link
    """Link of a NIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterFile(StrictFile):
    """A cluster as its file has it, with the device by name or described in full."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = 1
    hardware: str | Hardware
    nodes: Annotated[int, Ge(1)]
    gpus_per_node: Annotated[int, Ge(1)]
    nics_per_node: Annotated[int, Ge(1)] | None = None
    intra_node: Link
    inter_node: Link


@cache
def _described() -> Mapping[str, KnownDevice]:
    tables = tomllib.loads((files("mosaic.hardware") / "devices.toml").read_text(encoding="utf-8"))
    return MappingProxyType(
        {name: parse(KnownDevice, json.dumps(table), source=f"devices.toml: {name}") for name, table in tables.items()}
    )


def _known(name: str) -> KnownDevice:
    """A described device; the host has the cores and the memory of this machine."""
    known = _described()[name]
    return known if name != "host" else dataclasses.replace(known, hardware=_this_machine(known.hardware))


def _this_machine(core: Hardware) -> Hardware:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        memory_bytes = core.memory_bytes
    peaks = {name: cores * getattr(core, name) for name in ("bf16_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops")}
    return dataclasses.replace(core, num_sms=cores, memory_bytes=memory_bytes, **peaks)


def find_hardware(where: str) -> Hardware:
    """Returns a device by name, or from the file if ``where`` ends in ``.json``.

    Raises:
        ValueError: There is no device of that name.
        InvalidFileError: See ``load_hardware``.
    """
    if where.endswith(".json"):
        return load_hardware(Path(where))
    if where not in HARDWARE_NAMES:
        raise ValueError(f"{unknown('device', where, HARDWARE_NAMES)}, or a description in a .json file")
    return _known(where).hardware


def hardware_of(device: Device) -> Hardware | None:
    """Returns the description of a device by its product name; None for a device without a description."""
    if device.kind == "host":
        return find_hardware("host")
    words = device.name.lower().replace("-", " ").split()
    return next((find_hardware(name) for name in HARDWARE_NAMES if name.split("-")[0] in words), None)


def find_cluster(where: str, gpus: int | None = None) -> Cluster:
    """Returns a cluster from a file, or ``gpus`` devices of a name in nodes and with links that are usual for them.

    Args:
        where: Name of a device, or a .json file with a device or a cluster.
        gpus: Number of devices; by default 1, or all of the file's cluster.

    Raises:
        MosaicError: There is no device of that name, ``gpus`` does not fill whole nodes or is not the number in the
            file, or a file describes one device and its links are not known.
        InvalidFileError: See ``load_hardware``.
        ValueError: ``gpus`` is below 1.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus={gpus}; a cluster has at least one")
    if where.endswith(".json") and _is_cluster(Path(where)):
        cluster = load_cluster(Path(where))
        if gpus not in (None, cluster.num_devices):
            raise MosaicError(f"{where} describes {cluster.num_devices} devices, not {gpus}; leave the number out")
        return cluster
    hardware, count = find_hardware(where), gpus or 1
    if where.endswith(".json"):
        if count > 1:
            raise MosaicError(
                f"{where} describes one device and no links; describe the cluster: hardware, nodes, gpus_per_node, "
                "nics_per_node, intra_node and inter_node"
            )
        nowhere = Link(gb_per_s=1.0)  # one device sends nothing
        known = KnownDevice(hardware=hardware, per_node=1, nics=1, intra_node=nowhere, inter_node=nowhere)
    else:
        known = _known(where)
    per_node = min(count, known.per_node)
    if count % per_node:
        raise MosaicError(
            f"{count} devices do not fill nodes of {per_node} {where}; use a multiple of {per_node}, or describe the "
            "cluster in a file"
        )
    return Cluster(
        hardware=hardware,
        nodes=count // per_node,
        gpus_per_node=per_node,
        nics_per_node=known.nics,
        intra_node=known.intra_node,
        inter_node=known.inter_node,
    )


def load_hardware(path: Path) -> Hardware:
    """Reads the description of a device from a JSON file.

    Raises:
        InvalidFileError: The file is missing, not JSON, has an unknown field, lacks one, or a figure is zero,
            negative, infinite or not a number; the message has the line and the field.
    """
    return load(Hardware, path)


def load_cluster(path: Path) -> Cluster:
    """Reads a cluster from a JSON file: nodes, devices a node, links, and a device by name or described in full.

    Raises:
        InvalidFileError: See ``load_hardware``.
        MosaicError: There is no device of the name in the file.
    """
    read = load(_ClusterFile, path)
    return Cluster(
        hardware=find_hardware(read.hardware) if isinstance(read.hardware, str) else read.hardware,
        nodes=read.nodes,
        gpus_per_node=read.gpus_per_node,
        nics_per_node=read.nics_per_node,
        intra_node=read.intra_node,
        inter_node=read.inter_node,
    )


def _is_cluster(path: Path) -> bool:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever reads it next says what is wrong
        return False
    return isinstance(raw, dict) and "nodes" in raw
