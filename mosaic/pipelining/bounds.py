"""Lower bounds of a step's makespan, in a fraction of the time of a search.

Each is proven for every schedule of the task graph:

* ``load``: a row runs one task at a time.
* ``critical_path``: the longest path through waits, with lags.
* ``load_with_ends``: the load with the head of a row's first task and the tail of its last one.
* ``one_machine``: Jackson's preemptive schedule of each row with a head and a tail for each task; never below the two
  of a row's load. Heads and tails are longest paths, longer where several tasks of one row feed one task (pieces of a
  microbatch that the backbone waits for) by the row's time for all of them.
* ``memory``: for limited memory. Bytes that a task takes are matched with a later task that frees them, and held at
  least for the longest path between the two. Such boxes of bytes and time must fit on the rank between the first take
  and the last free, by area; also after rounding their bytes to shares of the memory by dual feasible functions, which
  counts that two boxes of more than half never overlap. The memory in use is exactly the sum of the boxes in any match.
  A rank has no such bound if a free may precede all takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.pipelining.tasks import TaskGraph
from mosaic.search_extension import load_search


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of a step's makespan."""

    load_ns: int
    """The largest sum of a row's times, the base of the bubble share."""
    load_with_ends_ns: int
    """The load with the shortest head and the shortest tail of the row."""
    critical_path_ns: int
    """The longest path."""
    one_machine_ns: int
    """Jackson's preemptive one-machine bound, the largest of all rows."""
    memory_ns: int
    """By bytes and time; 0 without a memory limit."""

    @property
    def ns(self) -> int:
        """The largest of them."""
        return max(self.load_ns, self.load_with_ends_ns, self.critical_path_ns, self.one_machine_ns, self.memory_ns)


def bound(graph: TaskGraph) -> Bounds:
    """Returns the lower bounds of a graph."""
    bounds = load_search().find_bounds(graph.compiled)
    return Bounds(
        load_ns=bounds.load_ns,
        load_with_ends_ns=bounds.ends_ns,
        critical_path_ns=bounds.way_ns,
        one_machine_ns=bounds.one_machine_ns,
        memory_ns=bounds.memory_ns,
    )
