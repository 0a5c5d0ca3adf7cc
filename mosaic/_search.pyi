"""Planning's hot loops, in C++ without the GIL; the same input and seed give the same answer unless the clock ends it.

Times are nanoseconds, sets of modules are bitmasks. ``ValueError`` for input that no search accepts.
"""

import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Matrix = Sequence[tuple[int, int, Sequence[Sequence[float]]]]

class Module:
    """Options (degree, quota, forward_ns, backward_ns, memory_bytes), and earlier modules."""

    def __init__(self, rows: Sequence[tuple[int, int, int, int, int]], before: Sequence[int]) -> None: ...

class Problem:
    def __init__(
        self, modules: Sequence[Module], *, num_devices: int, num_slots: int, memory_bytes: int = 0
    ) -> None: ...
    def disturb_by_shares(self, forward: _Matrix, backward: _Matrix) -> None:
        """Adds, for (module, neighbour), the share of its time alone that the neighbour costs, by both quotas."""

class Stage:
    latency_ns: int
    rows: list[tuple[int, int, tuple[int, ...]]]
    """(module, option, devices) of each: many values at once."""

class Plan:
    status: str
    """'optimal' or 'feasible'."""
    cost_ns: int
    """INT64_MAX // 4 without a plan."""
    bound_ns: int
    stages: list[Stage]

def plan(
    problem: Problem,
    *,
    effort: float = 10.0,
    seconds: float = math.inf,
    max_nodes: int = 2000000,
    forbidden: Sequence[int] = (),
    should_stop: Callable[[], bool] | None = None,
) -> Plan:
    """Searches until its effort (in about seconds of a core), the clock or ``should_stop`` ends it."""

def spend(effort: float = 0.0) -> float:
    """Adds effort to that of the searches on this thread; returns the sum."""

class Tasks:
    """Tasks of a step in columns: row, kind, microbatch, group, time, takes, frees; waits: source, target, lag."""

    def __init__(
        self,
        tasks: Sequence[array[int]],
        waits: Sequence[array[int]],
        rank_of: Sequence[int],
        base_bytes: Sequence[int],
        limit_bytes: Sequence[int],
    ) -> None: ...

class Deadlock:
    waiting: list[int]
    at_ns: int
    short_bytes: list[int]

class Replayed:
    makespan_ns: int
    start_ns: list[int]
    peak_bytes: list[int]
    deadlock: Deadlock | None
    """With a deadlock nothing else counts."""

class FoundOrders:
    has_any: bool
    orders: list[list[int]]
    start_ns: list[int]
    makespan_ns: int
    peak_bytes: list[int]
    num_rollouts: int
    progress: list[tuple[float, int]]
    deadlock: Deadlock | None
    """The first one."""

def replay(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Replayed: ...
def roll_out(tasks: Tasks) -> tuple[list[list[int]], Replayed]: ...
def lower_bound(tasks: Tasks) -> int: ...
def find_orders(
    tasks: Tasks,
    method: str,
    *,
    seconds: float,
    max_rollouts: int,
    num_threads: int,
    seed: int,
    bound_ns: int,
    should_stop: Callable[[], bool] | None,
) -> FoundOrders: ...

class MaskRuns:
    def __init__(self, words: npt.NDArray[np.int64], documents: npt.NDArray[np.int32]) -> None: ...
    def work(self, block: int) -> npt.NDArray[np.int64]: ...
    def tiles(
        self, rows: npt.NDArray[np.int64], block: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]: ...

def longest_first(work: npt.NDArray[np.int64], *, ranks: int, cap: int) -> npt.NDArray[np.int32]: ...
def traded(
    work: npt.NDArray[np.int64], rank_of: npt.NDArray[np.int32], *, ranks: int, fineness: int
) -> npt.NDArray[np.int32]: ...
