"""Lower bounds of a step's makespan, in a fraction of the time of a search.

Each is proven for every schedule of the task graph:

* ``load``: a row runs one task at a time.
* ``critical_path``: the longest path through waits, with lags.
* ``one_machine``: Jackson's preemptive schedule of each row with a head and a tail for each task. Heads and
  tails are longest paths, longer where several tasks of one row feed one task (pieces of a microbatch that the backbone
  waits for) by the row's time for all of them.

Memory bounds nothing here.
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
    critical_path_ns: int
    """The longest path."""
    one_machine_ns: int
    """Jackson's preemptive one-machine bound, the largest of all rows."""

    @property
    def ns(self) -> int:
        """The largest of them."""
        return max(self.load_ns, self.critical_path_ns, self.one_machine_ns)


def bound(graph: TaskGraph) -> Bounds:
    """Returns the lower bounds of a graph."""
    bounds = load_search().find_bounds(graph.compiled)
    return Bounds(
        load_ns=bounds.load_ns,
        critical_path_ns=bounds.way_ns,
        one_machine_ns=bounds.one_machine_ns,
    )
