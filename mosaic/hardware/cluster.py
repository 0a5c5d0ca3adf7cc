"""Devices in nodes, and the links between them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.hardware.description import Hardware
from mosaic.hardware.link import Link, Message
from mosaic.hardware.nccl import POST_US, PROTOCOLS, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices: GPUs that talk by NCCL, or hosts that talk by gloo in a plain ring.

    A module's devices are taken to be neighbours that fill one node after the other; a module that a plan spreads over
    more nodes than it needs takes longer.
    """

    hardware: Hardware
    """Description of each device."""
    nodes: int = 1
    """Nodes."""
    gpus_per_node: int = 1
    """Devices in each."""
    nics_per_node: int | None = None
    """NICs in each, or rails; None: as many as devices."""
    intra_node: Link
    """Of each device, to others of its node."""
    inter_node: Link
    """Of each NIC."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"nodes={self.nodes}, gpus_per_node={self.gpus_per_node}; a cluster has at least one each")
        if self.nics_per_node is not None and self.nics_per_node < 1:
            raise ValueError(f"nics_per_node={self.nics_per_node}; a node has at least one")

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.nodes * self.gpus_per_node

    def gb_per_s(self, degree: int) -> float:
        """Returns what one of ``degree`` devices has of the slowest link between them, in 10^9 bytes a second."""
        if degree <= self.gpus_per_node:
            return self.intra_node.gb_per_s
        return self.inter_node.gb_per_s * self._nics / self.gpus_per_node

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time of an all-reduce of ``num_bytes`` on each of ``degree`` devices, in milliseconds.

        On GPUs ``mosaic.hardware.nccl``, on hosts a ring over the slowest link. Where the last node is not full, only
        as many rails as it has near the devices in use carry anything.
        """
        if self._is_ring:
            return self._plain(degree).all_reduce_ms(num_bytes, degree)
        nodes = -(-degree // self.gpus_per_node)
        last = degree - (nodes - 1) * self.gpus_per_node
        group = Group(
            members=min(degree, self.gpus_per_node),
            nodes=nodes,
            rails=-(-last * self._nics // self.gpus_per_node),
            inside=self._reached(self.intra_node),
            between=self._reached(self.inter_node),
        )
        return group.all_reduce_ms(num_bytes)

    def exchange_ms(self, messages: Sequence[Message]) -> float:
        """Returns the time of messages that are sent together, in milliseconds: one, or an all-to-all.

        Devices are numbered node by node. Each sends to other nodes over the NIC that is nearest to it, which devices
        share where there are fewer; all links work at the same time, each way, and the busiest decides. To the time of
        one message comes that of posting each further one. On hosts, messages go one after the other.
        """
        messages = [message for message in messages if message.num_bytes > 0 and message.source != message.target]
        if not messages:
            return 0.0
        if self._is_ring:
            return self._plain(self.num_devices).exchange_ms(messages)
        inside, between = self._reached(self.intra_node), self._reached(self.inter_node)
        busy_ms: defaultdict[tuple[str, bool, int], float] = defaultdict(float)
        latency_us, posts = 0.0, Counter[tuple[bool, int]]()
        for message in messages:
            ends = message.source, message.target
            is_inside = ends[0] // self.gpus_per_node == ends[1] // self.gpus_per_node
            link = inside if is_inside else between
            latency_us = max(latency_us, link.latency_us)
            for is_sent, device in zip((True, False), ends, strict=True):
                at = ("device", is_sent, device) if is_inside else ("nic", is_sent, self._nic(device))
                busy_ms[at] += message.num_bytes / link.gb_per_s / 1e6
                posts[is_sent, device] += 1
        latency_us += PROTOCOLS[-1].base_us + (max(posts.values()) - 1) * POST_US
        return latency_us / 1e3 + max(busy_ms.values())

    @property
    def _nics(self) -> int:
        return self.gpus_per_node if self.nics_per_node is None else self.nics_per_node

    def _nic(self, device: int) -> int:
        node, local = divmod(device, self.gpus_per_node)
        return node * self._nics + local * self._nics // self.gpus_per_node

    @property
    def _is_ring(self) -> bool:
        return self.hardware.kind == "host"

    def _plain(self, degree: int) -> Link:
        return self._reached(self.intra_node if degree <= self.gpus_per_node else self.inter_node)

    def _reached(self, link: Link) -> Link:
        return dataclasses.replace(link, gb_per_s=link.gb_per_s * self.hardware.efficiency.network)
