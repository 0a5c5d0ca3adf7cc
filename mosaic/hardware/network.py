"""Links between devices, and formulas for the time of messages and all-reduces.

*Hosts* and measured links are a plain ring, like gloo's. *GPUs in nodes* run NCCL's all-reduce in three phases:
reduce-scatter inside each node, all-reduce across nodes on every rail (a NIC of each node), and all-gather inside each
node. Both kinds of link work at the same time, on pieces of the size of NCCL's buffers. A message of one piece takes
the sum of the phases, a long one the time of the slower kind of link::

    inside   | 1 |   | 2 |   | 3 |   |          d = m n devices, n nodes, r rails, S bytes
    rails    |   |-1-|   |-2-|   |-3-|          inside 2 (m-1)/m S, on a rail 2 (n-1)/n S/r (ring) or 2 S/r (tree)

Latencies are NCCL's, by protocol and kind of link: ``baseLat`` and ``hwLat`` of ``src/graph/tuning.cc``
(github.com/NVIDIA/nccl, version 2.30.7). Inside a node they are those of its ring. A rail has one device per node, for
which NCCL uses the tree's network latency for ring and tree alike. Protocols trade latency for bandwidth: LL sends a
flag with every 4 bytes, LL128 one with every 120. The fastest is used. NCCL chooses between flat rings, trees and
NVLink SHARP; this is one model for all of them. ``tests/unit/hardware/test_network.py`` compares it with published
measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from mosaic.artifact import Ge, StrictFile
from mosaic.hardware.description import Hardware

BUFFER_BYTES = 4 * 2**20
"""Buffer size of a channel (one per rail): NCCL_BUFFSIZE in NCCL's documentation."""
POST_US = 2.0
"""Time to post each further message, in microseconds: ``getNetOverhead`` of the same file, on AMD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes sent between devices, by (source, destination) index."""

    source: int
    target: int
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(StrictFile):
    """The bandwidth in one direction and the latency of a link.

    As a network: equal devices with one such link each.
    """

    gb_per_s: float
    """Bandwidth in one direction, in GB/s: of a device within a node, of a NIC between nodes."""
    latency_us: float = 5.0
    """Latency of one message, in microseconds; on GPUs, of NCCL's Simple protocol."""
    ll128_us: float | None = None
    """Latency of NCCL's LL128 protocol; None if unused."""
    ll_us: float | None = None
    """Latency of NCCL's LL protocol; None if unused."""

    def __post_init__(self) -> None:
        if not 0 < self.gb_per_s < math.inf:  # also catches NaN
            raise ValueError(f"link: gb_per_s={self.gb_per_s}; use a finite number above 0")
        for name in ("latency_us", "ll128_us", "ll_us"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"link: {name}={value}; use a finite number, 0 or more")

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time of a ring all-reduce of ``num_bytes`` on each of ``degree`` devices, in milliseconds.

        As in gloo, each device sends 2 (d-1)/d of the bytes in 2 (d-1) steps (Patarasuk and Yuan, 2009).
        """
        if degree <= 1 or num_bytes <= 0:
            return 0.0
        steps = 2 * (degree - 1)
        return steps * self.latency_us / 1e3 + steps / degree * num_bytes / self.gb_per_s / 1e6

    def exchange_ms(self, messages: Sequence[Message]) -> float:
        """Returns the time of concurrent messages, in milliseconds.

        A device sends its messages one after the other and receives at the same time.
        """
        direction_ms: defaultdict[tuple[bool, int], float] = defaultdict(float)
        for message in messages:
            own_ms = self.latency_us / 1e3 + message.num_bytes / self.gb_per_s / 1e6
            direction_ms[True, message.source] += own_ms
            direction_ms[False, message.target] += own_ms
        return max(direction_ms.values(), default=0.0)


class Protocol(NamedTuple):
    """A protocol of NCCL."""

    latency: str
    """Name of its latency's field in ``Link``."""
    base_us: float
    """Constant time of a collective, in microseconds."""
    share: float
    """Share of a link's bandwidth that carries data."""
    node_gb_per_s: float = math.inf
    """Maximum bandwidth between a node and others, in GB/s."""


PROTOCOLS = (
    # llMaxBws of tuning.cc: 88 GB/s in a node of A100s, which reach 240; 19 to 39 between nodes
    Protocol("ll_us", base_us=6.8, share=0.37, node_gb_per_s=20.0),
    Protocol("ll128_us", base_us=14.0, share=0.92),
    Protocol("latency_us", base_us=8.4, share=1.0),
)
"""LL, LL128 and Simple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(StrictFile):
    """Equal nodes of equal devices: GPUs with NCCL, or hosts with gloo in a plain ring.

    A module's devices are assumed to fill one node after the other; a module spread over more nodes takes longer.
    """

    hardware: Hardware
    nodes: Annotated[int, Ge(1)] = 1
    gpus_per_node: Annotated[int, Ge(1)] = 1
    """Number of devices per node."""
    nics_per_node: Annotated[int, Ge(1)] | None = None
    """Number of NICs (rails) per node; None: one per device."""
    intra_node: Link
    """Link of each device within its node."""
    inter_node: Link
    """Link of each NIC."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns the time of an all-reduce of ``num_bytes`` on each of ``degree`` devices, in milliseconds.

        GPUs use the fastest protocol and the faster of ring and tree, hosts a ring over the slowest link. If the last
        node is not full, only the rails near its devices are used.
        """
        if self._is_ring:
            return self._plain(degree).all_reduce_ms(num_bytes, degree)
        if degree <= 1 or num_bytes <= 0:
            return 0.0
        members, nodes = min(degree, self.gpus_per_node), -(-degree // self.gpus_per_node)
        last = degree - (nodes - 1) * self.gpus_per_node
        rails = -(-last * self._nics // self.gpus_per_node)
        inside, between = self._reached(self.intra_node), self._reached(self.inter_node)
        links = [inside] * (members > 1) + [between] * (nodes > 1)
        protocols = [by for by in PROTOCOLS if all(getattr(link, by.latency) is not None for link in links)]

        def time_ms(by: Protocol, steps: int, share: float) -> float:
            """Returns the time of ``steps`` across nodes, in which a rail sends ``share`` of its bytes."""
            latency_us, inside_ms, between_ms = by.base_us, 0.0, 0.0
            if members > 1:
                passes = 2 * (members - 1)
                latency_us += passes * getattr(inside, by.latency)
                inside_ms = passes / members * num_bytes / (inside.gb_per_s * by.share) / 1e6
            if nodes > 1:
                latency_us += steps * getattr(between, by.latency)
                between_ms = share * num_bytes / min(rails * between.gb_per_s * by.share, by.node_gb_per_s) / 1e6
            pieces = max(1.0, num_bytes / (rails * BUFFER_BYTES))
            return latency_us / 1e3 + max(inside_ms, between_ms) + min(inside_ms, between_ms) / pieces

        ring = (2 * (nodes - 1), 2 * (nodes - 1) / nodes)
        tree = (2 * math.ceil(math.log2(nodes)), 1 if nodes == 2 else 2)
        return min(time_ms(by, *across) for by in protocols for across in (ring, tree))

    def exchange_ms(self, messages: Sequence[Message]) -> float:
        """Returns the time of concurrent messages, such as an all-to-all, in milliseconds.

        Devices are numbered node by node. Each sends to other nodes over its nearest NIC, which it may share. All links
        work concurrently in both directions, and the busiest decides. Each further message adds its posting time. On
        hosts, messages are sent one after the other.
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
