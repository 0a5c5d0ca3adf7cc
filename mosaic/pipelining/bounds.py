"""Times that no orders of a step are below, in a fraction of the time of a search.

Proven, each for every schedule of the task graph:

* ``load``: a row runs one task at a time.
* ``critical_path``: the longest way through waits, with lags.
* ``load_with_ends``: a row's first task has something before it, and its last one something behind it.
* ``one_machine``: Jackson's preemptive schedule of each row with a head and a tail for each task; never below the two
  of a row's load. Heads and tails are longest ways, lengthened where several tasks of one row feed one task (pieces of
  a microbatch that the backbone waits for): that row takes its time for all of them.
* ``memory``: where a rank's memory is limited. Bytes that a task takes are matched with a later task that frees them,
  and held at least for the longest way between the two. Such boxes of bytes and time must fit on the rank between the
  first take and the last free, by area; also after rounding their bytes to shares of the memory by dual feasible
  functions, which counts that two boxes of more than half never overlap. What is in use is exactly the sum of the
  boxes, whichever match is made. Where a free follows no take of its rank for sure, a rank has no such bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from mosaic.pipelining.tasks import TaskGraph
from mosaic.search_extension import load_search


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of a step's makespan."""

    load_ns: int
    """The longest sum of a row's times: what a share of bubbles counts from."""
    load_with_ends_ns: int
    """The same with the shortest head and the shortest tail of the row."""
    critical_path_ns: int
    """The longest way."""
    one_machine_ns: int
    """Jackson's preemptive one-machine bound, the largest of all rows."""
    memory_ns: int
    """By bytes and time; 0 where memory has no limit."""

    @property
    def ns(self) -> int:
        """The largest of them: what every answer is compared with."""
        return max(self.load_ns, self.load_with_ends_ns, self.critical_path_ns, self.one_machine_ns, self.memory_ns)


def bound(graph: TaskGraph) -> Bounds:
    """Returns times that no orders of the graph are below."""
    found = load_search().find_bounds(graph.compiled)
    return Bounds(
        load_ns=found.load_ns,
        load_with_ends_ns=found.ends_ns,
        critical_path_ns=found.way_ns,
        one_machine_ns=found.one_machine_ns,
        memory_ns=found.memory_ns,
    )
