"""Finding devices and clusters by name or in files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, load
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import MosaicError, unknown
from mosaic.hardware.catalogue import DEVICES
from mosaic.hardware.cluster import Cluster
from mosaic.hardware.description import Hardware
from mosaic.hardware.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterFile:
    """A cluster as its file has it: the device by name, or described in full."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    hardware: str | Hardware
    nodes: Annotated[int, Ge(1)]
    gpus_per_node: Annotated[int, Ge(1)]
    nics_per_node: Annotated[int, Ge(1)] | None = None
    intra_node: Link
    inter_node: Link


def find_hardware(where: str) -> Hardware:
    """Returns a device by name, or from the file if ``where`` ends in ``.json``.

    Raises:
        ValueError: There is no device of that name.
        InvalidFileError: See ``load_hardware``.
    """
    if where.endswith(".json"):
        return load_hardware(Path(where))
    if where not in DEVICES:
        raise ValueError(f"{unknown('device', where, DEVICES)}, or a description in a .json file")
    return DEVICES[where].describe()


def hardware_of(device: Device) -> Hardware | None:
    """Returns the description of a device by its product name; None for a device without a description."""
    if device.kind == "host":
        return find_hardware("host")
    words = device.name.lower().replace("-", " ").split()
    return next((find_hardware(name) for name in DEVICES if name.split("-")[0] in words), None)


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
    hardware = find_hardware(where)
    count = gpus or 1
    if where.endswith(".json"):
        if count > 1:
            raise MosaicError(
                f"{where} describes one device and no links; describe the cluster: hardware, nodes, gpus_per_node, "
                "nics_per_node, intra_node and inter_node"
            )
        most, nics, intra, inter = 1, 1, Link(gb_per_s=1.0), Link(gb_per_s=1.0)  # one device sends nothing
    else:
        known = DEVICES[hardware.name]
        most, nics, intra, inter = known.per_node, known.nics, known.intra_node, known.inter_node
    per_node = min(count, most)
    if count % per_node:
        raise MosaicError(
            f"{count} devices do not fill nodes of {per_node} {where}; use a multiple of {per_node}, or describe the "
            "cluster in a file"
        )
    return Cluster(
        hardware=hardware,
        nodes=count // per_node,
        gpus_per_node=per_node,
        nics_per_node=nics,
        intra_node=intra,
        inter_node=inter,
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
