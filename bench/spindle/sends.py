"""What travels between waves under a plan: activations from slice to slice and from module to module, and back.

Neither a plan's predicted time nor a search has a price for it; here it is worked out from where things are. Flows into
the same wave travel at the same time, and the longest of them counts (``reshard_ms``: the busiest device of the flow,
over the slowest link that it needs); in the backward the same bytes take the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.spindle.workload import Workload
from mosaic.hardware import Cluster
from mosaic.plan import Placement, Plan
from mosaic.simulate.step import reshard_ms


def sent_ms(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """Returns the time of all sends and receives between waves, forward and backward, in milliseconds."""
    longest: dict[int, float] = {}
    for wave, source, target, num_bytes in _flows(plan, workload):
        nodes = {device // cluster.gpus_per_node for device in (*source.devices, *target.devices)}
        link = cluster.intra_node if len(nodes) == 1 else cluster.inter_node
        longest[wave] = max(longest.get(wave, 0.0), reshard_ms(source, target, num_bytes, link))
    return 2 * sum(longest.values())


def _flows(plan: Plan, workload: Workload) -> Iterator[tuple[int, Placement, Placement, int]]:
    """The wave before which something travels, from where, to where, and its bytes."""
    last: dict[str, Placement] = {}
    for wave, stage in enumerate(plan.stages):
        for placed in stage.placements:
            if placed.part.first:
                yield wave, last[placed.module], placed, workload.layer_bytes[placed.module]
            else:
                for edge in workload.graph.edges:
                    if edge.target == placed.module:
                        yield wave, last[edge.source], placed, edge.num_bytes or 0
        last |= {placed.module: placed for placed in stage.placements}
