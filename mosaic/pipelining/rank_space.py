"""The ranks of a pipeline for its planner: devices, memory and network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.hardware import Cluster, Link
from mosaic.pipelining.costs import Strategies
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.plan import NO_HOST_TIMES, HostTimes
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.workload.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpace:
    """Ranks of the planner.

    Raises:
        ValueError: ``devices_per_rank`` is below 1, or the limit is negative.
    """

    network: Link | Cluster | None = None
    """Network between ranks; None: messages take no time."""
    devices_per_rank: int = 1
    """Devices of one rank: tensor times context parallel."""
    limit_bytes: int = 0
    """Memory of each of a rank's devices; 0: no limit."""
    host: HostTimes = NO_HOST_TIMES
    """Host time of tasks and messages."""

    def __post_init__(self) -> None:
        if self.devices_per_rank < 1 or self.limit_bytes < 0:
            raise ValueError(
                f"devices_per_rank={self.devices_per_rank}, limit_bytes={self.limit_bytes}; a rank has a device at "
                "least, and a limit is 0 (none) or more bytes"
            )

    def tasks(
        self,
        request: Request,
        partition: Partition,
        microbatches: Sequence[Microbatch],
        *,
        strategies: Strategies = "keep",
        weights_apart: bool = False,
    ) -> TaskGraph:
        """Returns the tasks of a step on these ranks; see ``task_graph``."""
        return task_graph(
            request.model,
            partition,
            microbatches,
            network=self.network,
            devices_per_rank=self.devices_per_rank,
            strategies=strategies,
            weights_apart=weights_apart,
            host=self.host,
            limit_bytes=(self.limit_bytes,) * partition.num_ranks if self.limit_bytes else (),
        )
