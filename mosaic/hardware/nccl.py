"""NCCL's all-reduce over GPUs in nodes, as time. Formulas with public constants; nothing was measured here.

Three phases: gradients are reduce-scattered inside each node, all-reduced across nodes on every rail (a NIC of each
node), and all-gathered inside. The two kinds of link work at the same time, on pieces as large as NCCL's buffers; a
message of one piece takes the sum of the phases, a long one what the slower kind of link takes::

    inside   | 1 |   | 2 |   | 3 |   |          d = m n devices, n nodes, r rails, S bytes
    rails    |   |-1-|   |-2-|   |-3-|          inside 2 (m-1)/m S, on a rail 2 (n-1)/n S/r (ring) or 2 S/r (tree)

Latencies are NCCL's own, by protocol and kind of link: ``baseLat`` and ``hwLat`` of ``src/graph/tuning.cc``
(github.com/NVIDIA/nccl, version 2.30.7). Inside a node they are those of its ring. A rail has one device a node, where
NCCL takes the network's latency from the tree's column for ring and tree alike, since nothing hides a step. Protocols
trade latency for bandwidth: LL sends a flag with every 4 bytes, LL128 one with every 120. The quickest is taken.

NCCL itself picks among flat rings, trees and NVLink SHARP, which it describes by the same tables; ours is one form for
all of them. ``tests/unit/hardware/test_nccl.py`` compares it with published measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mosaic.hardware.link import Link

BUFFER_BYTES = 4 * 2**20
"""Bytes of a channel's buffer, of which a rail has one: NCCL_BUFFSIZE of NCCL's documentation."""
POST_US = 2.0
"""Time to post one more message beside the first, in microseconds: ``getNetOverhead`` of the same file, on AMD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """NCCL's protocol and its efficiency."""

    latency: Literal["ll_us", "ll128_us", "latency_us"]
    """Field of a link that has its latency."""
    base_us: float
    """Time of a collective whatever its size and number of steps, in microseconds."""
    share: float
    """Of a link's bandwidth that data get."""
    node_gb_per_s: float = math.inf
    """Most that a node sends to others, in 10^9 bytes a second."""


PROTOCOLS = (
    # llMaxBws of tuning.cc: 88 GB/s in a node of A100s, which reach 240; 19 to 39 between nodes
    Protocol(latency="ll_us", base_us=6.8, share=0.37, node_gb_per_s=20.0),
    Protocol(latency="ll128_us", base_us=14.0, share=0.92),
    Protocol(latency="latency_us", base_us=8.4, share=1.0),
)
"""LL, LL128 and Simple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices of a collective, by nodes."""

    members: int
    """In the fullest node."""
    nodes: int
    """Nodes that have any."""
    rails: int
    """NICs that every one of these nodes has near its members."""
    inside: Link
    """Between devices of a node, as fast as it is reached."""
    between: Link
    """Of a NIC, as fast as it is reached."""

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Returns the time of the quickest protocol and of the quicker of ring and tree, in milliseconds."""
        if self.members * self.nodes <= 1 or num_bytes <= 0:
            return 0.0
        n = self.nodes
        ring = (2 * (n - 1), 2 * (n - 1) / n)
        tree = (2 * math.ceil(math.log2(n)), 1 if n == 2 else 2)
        return min(self._time_ms(num_bytes, by, *across) for by in self._protocols() for across in (ring, tree))

    def _protocols(self) -> list[Protocol]:
        used = [self.inside] * (self.members > 1) + [self.between] * (self.nodes > 1)
        return [by for by in PROTOCOLS if all(getattr(link, by.latency) is not None for link in used)]

    def _time_ms(self, num_bytes: float, by: Protocol, steps: int, share: float) -> float:
        """``steps`` across nodes, in which a rail sends ``share`` of its bytes."""
        latency_us, inside_ms, between_ms = by.base_us, 0.0, 0.0
        if self.members > 1:
            passes = 2 * (self.members - 1)
            latency_us += passes * getattr(self.inside, by.latency)
            inside_ms = passes / self.members * num_bytes / (self.inside.gb_per_s * by.share) / 1e6
        if self.nodes > 1:
            rails_gb_per_s = min(self.rails * self.between.gb_per_s * by.share, by.node_gb_per_s)
            latency_us += steps * getattr(self.between, by.latency)
            between_ms = share * num_bytes / rails_gb_per_s / 1e6
        pieces = max(1.0, num_bytes / (self.rails * BUFFER_BYTES))
        return latency_us / 1e3 + max(inside_ms, between_ms) + min(inside_ms, between_ms) / pieces
