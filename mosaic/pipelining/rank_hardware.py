"""Latencies of collectives and messages between the ranks of a cluster, in whole nanoseconds.

The cost of a collective is ``Cluster``'s own model of NCCL. An all-gather or a reduce-scatter sends half the bytes of
an all-reduce of the same tensor (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2), and takes half of its time
in this model.

Ranks are numbered as in Megatron: tensor first, then context, data, pipeline. Tensor peers are neighbours; context
peers are ``tensor`` devices apart, as are the data and context ranks that sum gradients together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from mosaic.hardware import Cluster, Message

MAX_KNOWN = 20_000
"""Most cached times of a machine."""

Axis = Literal["tensor", "context", "data"]
"""Axis of a collective's peers; ``data`` has all that sum gradients, including context ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism along each axis.

    Raises:
        ValueError: A degree is below 1.
    """

    tensor: int = 1
    """Ranks that share each matrix, with Megatron's sequence parallelism."""
    pipeline: int = 1
    """Ranks with different layers."""
    data: int = 1
    """Replicas with different microbatches, which sum their gradients."""
    context: int = 1
    """Ranks that share each sequence."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"degrees: {name}={value!r}; use a whole number, 1 or more")

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.tensor * self.pipeline * self.data * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An all-gather or reduce-scatter of a tensor, or both as an all-reduce."""

    name: str
    """Such as ``gather qkv``."""
    num_bytes: int
    """Bytes of the whole, gathered tensor."""
    axis: Axis
    is_reduce: bool = False
    """True for a whole all-reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Messages between all context peers at once, of different sizes."""

    name: str
    """Such as ``attention keys``."""
    sent_bytes: tuple[tuple[int, ...], ...]
    """Bytes from each peer (row) to each peer (column)."""
    axis: Literal["context"] = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHardware:
    """One rank of a job, and the links to its peers.

    Raises:
        ValueError: The share is not above 0 and at most 1, or the job needs more devices than the cluster has.
    """

    cluster: Cluster
    degrees: Degrees = Degrees()
    share: float = 1.0
    """Share of the device's SMs for kernels; below 1 for lanes."""
    _known: dict[Collective | Exchange, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}; use a share of the SMs above 0 and at most 1")
        if self.degrees.num_devices > self.cluster.num_devices:
            raise ValueError(
                f"{self.degrees} need {self.degrees.num_devices} devices; the cluster has {self.cluster.num_devices}"
            )

    @property
    def num_sms(self) -> int:
        """SMs for kernels, at least one."""
        return max(1, round(self.cluster.hardware.num_sms * self.share))

    def time_ns(self, message: Collective | Exchange) -> int:
        """Returns the time of a collective or an exchange; cached."""
        time_ns = self._known.get(message)
        if time_ns is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            time_ns = self.exchange_ns(message) if isinstance(message, Exchange) else self.collective_ns(message)
            self._known[message] = time_ns
        return time_ns

    def collective_ns(self, collective: Collective) -> int:
        """Returns the time of a collective among this rank's peers; 0 without peers."""
        degree = self._degree(collective.axis)
        whole = self._peers(degree, collective.axis).all_reduce_ms(collective.num_bytes, degree)
        return round(whole * 1e6 * (1.0 if collective.is_reduce else 0.5))

    def exchange_ns(self, exchange: Exchange) -> int:
        """Returns the time of messages among this rank's peers.

        Raises:
            ValueError: Senders and peers differ in number.
        """
        degree = self._degree(exchange.axis)
        if len(exchange.sent_bytes) != degree:
            raise ValueError(f"{exchange.name}: {len(exchange.sent_bytes)} senders among {degree} context ranks")
        messages = [
            Message(source=source, target=target, num_bytes=count)
            for source, row in enumerate(exchange.sent_bytes)
            for target, count in enumerate(row)
        ]
        return round(self._peers(degree, exchange.axis).exchange_ms(messages) * 1e6)

    def _degree(self, axis: Axis) -> int:
        degrees = self.degrees
        return {"tensor": degrees.tensor, "context": degrees.context, "data": degrees.data * degrees.context}[axis]

    def _peers(self, degree: int, axis: Axis) -> Cluster:
        """Returns the cluster of one peer: every ``stride``-th device, and its part of the NICs."""
        stride = 1 if axis == "tensor" else self.degrees.tensor
        cluster = self.cluster
        inside = max(1, cluster.gpus_per_node // stride)
        nics = cluster.gpus_per_node if cluster.nics_per_node is None else cluster.nics_per_node
        rails = max(1, nics * inside // cluster.gpus_per_node)
        shared = min(1.0, nics * inside / cluster.gpus_per_node / rails)
        between = dataclasses.replace(cluster.inter_node, gb_per_s=cluster.inter_node.gb_per_s * shared)
        nodes = -(-degree // inside)
        return dataclasses.replace(cluster, nodes=nodes, gpus_per_node=inside, nics_per_node=rails, inter_node=between)
