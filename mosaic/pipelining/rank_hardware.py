"""Latencies of collectives and messages between the ranks of a cluster, in whole nanoseconds.

The cost of a collective is ``Cluster``'s own model of NCCL. An all-gather or a reduce-scatter takes half the time of an
all-reduce of the same tensor (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

Ranks are numbered as in Megatron: tensor first, then context, data, pipeline. Tensor peers are neighbours; context
peers are ``tensor`` devices apart, as are the data and context ranks that sum gradients together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from mosaic.hardware import Cluster, Message

Axis = Literal["tensor", "context", "data"]
"""Axis of a collective's peers; ``data`` has all that sum gradients, including context ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of parallelism along each axis.

    Raises:
        ValueError: A degree is below 1, or ``tensor_by_place`` does not fit the others.
    """

    tensor: int = 1
    """Ranks that share each matrix, with Megatron's sequence parallelism."""
    pipeline: int = 1
    """Ranks with different layers."""
    data: int = 1
    """Replicas with different microbatches, which sum their gradients."""
    context: int = 1
    """Ranks that share each sequence."""
    tensor_by_place: tuple[int, ...] = ()
    """Degrees of the pipeline's ranks where modules have their own; ``tensor`` is the largest of them."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"degrees: {name}={value!r}; use a whole number, 1 or more")
        own = self.tensor_by_place
        if own and (len(own) != self.pipeline or min(own) < 1 or max(own) != self.tensor):
            raise ValueError(
                f"degrees: tensor_by_place={own}; use {self.pipeline} numbers, of which {self.tensor} is the largest"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Tensor ranks of each rank of the pipeline."""
        return self.tensor_by_place or (self.tensor,) * self.pipeline

    @property
    def num_devices(self) -> int:
        return sum(self.widths) * self.data * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHardware:
    """One rank of a job, and the links to its peers.

    Raises:
        ValueError: The job needs more devices than the cluster has.
    """

    cluster: Cluster
    degrees: Degrees = Degrees()
    _known: dict[object, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.degrees.num_devices > self.cluster.num_devices:
            raise ValueError(
                f"{self.degrees} need {self.degrees.num_devices} devices; the cluster has {self.cluster.num_devices}"
            )

    def gather_ns(self, num_bytes: int, axis: Axis) -> int:
        """Returns the time of an all-gather or a reduce-scatter of a tensor of so many bytes among peers."""
        if (num_bytes, axis) not in self._known:
            peers = self._peers(axis)
            whole_ms = peers.all_reduce_ms(num_bytes, self._degree(axis))
            self._known[num_bytes, axis] = round(whole_ms * 1e6 / 2)
        return self._known[num_bytes, axis]

    def exchange_ns(self, sent_bytes: tuple[tuple[int, ...], ...]) -> int:
        """Returns the time of messages at once from each context peer (row) to each (column)."""
        if sent_bytes not in self._known:
            messages = [
                Message(source=source, target=target, num_bytes=count)
                for source, row in enumerate(sent_bytes)
                for target, count in enumerate(row)
            ]
            self._known[sent_bytes] = round(self._peers("context").exchange_ms(messages) * 1e6)
        return self._known[sent_bytes]

    def _degree(self, axis: Axis) -> int:
        degrees = self.degrees
        return {"tensor": degrees.tensor, "context": degrees.context, "data": degrees.data * degrees.context}[axis]

    def _peers(self, axis: Axis) -> Cluster:
        """Returns the cluster of one peer: every ``stride``-th device, and its part of the NICs."""
        stride = 1 if axis == "tensor" else self.degrees.tensor
        cluster = self.cluster
        inside = max(1, cluster.gpus_per_node // stride)
        nics = cluster.gpus_per_node if cluster.nics_per_node is None else cluster.nics_per_node
        rails = max(1, nics * inside // cluster.gpus_per_node)
        shared = min(1.0, nics * inside / cluster.gpus_per_node / rails)
        between = replace(cluster.inter_node, gb_per_s=cluster.inter_node.gb_per_s * shared)
        nodes = -(-self._degree(axis) // inside)
        return replace(cluster, nodes=nodes, gpus_per_node=inside, nics_per_node=rails, inter_node=between)
