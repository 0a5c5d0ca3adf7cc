"""Planning's hot loops.

Plain C++, no CUDA, the GIL released; the same input and seed give the same answer while no wall-clock limit ends the
search. Times are nanoseconds. ``ValueError`` for what no search can work on.
"""

import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

class Module:
    """A module's options, and the modules that must be in an earlier stage."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int, int, int, int]],
        before: Sequence[int],
        bandwidths: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Takes options as (degree, quota, forward_ns, backward_ns, memory_bytes).

        ``bandwidths`` are the shares of the device's memory bandwidth that each draws, forward and backward.
        """

class Problem:
    """The modules and devices to plan for."""

    def __init__(
        self,
        modules: Sequence[Module],
        *,
        num_devices: int,
        num_slots: int,
        memory_bytes: int = 0,
    ) -> None: ...
    def disturb_by_shares(
        self,
        forward: Sequence[tuple[int, int, Sequence[Sequence[float]]]],
        backward: Sequence[tuple[int, int, Sequence[Sequence[float]]]],
    ) -> None:
        """Adds, for (module, neighbour), what share of its time alone the neighbour costs.

        A row for each quota that the module may have, an entry for each that the neighbour may, both rising.
        """
    def disturb_by_bandwidth(
        self, forward_ns: tuple[float, float, float], backward_ns: tuple[float, float, float]
    ) -> None:
        """Adds e1 + e2 * sum B + e3 * prod B, at its largest over sets with one neighbour or more."""

class Stage:
    """Modules side by side."""

    @property
    def forward_ns(self) -> int: ...
    @property
    def backward_ns(self) -> int: ...
    @property
    def latency_ns(self) -> int: ...
    @property
    def rows(self) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """(module, option, devices, starts) of each: many values at once."""

class Plan:
    """The best plan found, and a bound that no plan can be below."""

    @property
    def status(self) -> str:
        """'optimal' or 'feasible'."""
    @property
    def cost_ns(self) -> int:
        """INT64_MAX // 4 where what is forbidden leaves no plan."""
    @property
    def bound_ns(self) -> int: ...
    @property
    def stages(self) -> list[Stage]: ...
    @property
    def num_evaluations(self) -> int: ...

def plan(
    problem: Problem,
    *,
    effort: float = 10.0,
    seconds: float = math.inf,
    max_nodes: int = 2000000,
    forbidden: Sequence[int] = (),
    should_stop: Callable[[], bool] | None = None,
) -> Plan:
    """Searches for the best plan; as at the end of its effort where ``should_stop``, asked now and then, says so.

    Effort is work that is counted, in about seconds of a core; ``seconds`` are those of the clock, which may end a
    search before.

    Sets of modules are bitmasks; no stage is one of ``forbidden``.
    """

def spend(effort: float = 0.0) -> float:
    """Adds effort, in about seconds of a core, to what searches on this thread have spent; returns that."""

class Tasks:
    """Tasks of a step, compiled."""

    def __init__(
        self,
        tasks: Sequence[array[int]],
        waits: Sequence[array[int]],
        rank_of: Sequence[int],
        base_bytes: Sequence[int],
        limit_bytes: Sequence[int],
    ) -> None:
        """From columns: row, kind, microbatch, group, time, takes, frees; source, target, lag."""
    @property
    def num_groups(self) -> int: ...
    @property
    def natural_ranking(self) -> list[int]:
        """Groups by microbatch, each after what feeds it."""

class Deadlock:
    """Rows that wait for ever."""

    @property
    def waiting(self) -> list[int]: ...
    @property
    def at_ns(self) -> int: ...
    @property
    def short_bytes(self) -> list[int]: ...

class Replayed:
    """A step played."""

    @property
    def makespan_ns(self) -> int: ...
    @property
    def start_ns(self) -> list[int]: ...
    @property
    def peak_bytes(self) -> list[int]: ...
    @property
    def deadlock(self) -> Deadlock | None:
        """The rows that wait for ever; nothing else counts then."""

class FoundOrders:
    """The best orders that a search found."""

    @property
    def has_any(self) -> bool: ...
    @property
    def orders(self) -> list[list[int]]: ...
    @property
    def start_ns(self) -> list[int]: ...
    @property
    def makespan_ns(self) -> int: ...
    @property
    def num_rollouts(self) -> int: ...
    @property
    def num_deadlocks(self) -> int: ...
    @property
    def progress(self) -> list[tuple[float, int]]: ...
    @property
    def deadlock(self) -> Deadlock | None:
        """The first one met."""

def replay(tasks: Tasks, orders: Sequence[Sequence[int]]) -> Replayed:
    """Plays orders."""

def peak(tasks: Tasks, orders: Sequence[Sequence[int]], start_ns: Sequence[int]) -> list[int]:
    """Most in use on each rank where tasks run in these orders and start at these times."""

def roll_out(tasks: Tasks, ranking: Sequence[int], is_gated: bool) -> tuple[list[list[int]], Replayed]:
    """Rolls a ranking of groups out."""

def lower_bound(tasks: Tasks) -> int:
    """Returns a time that no orders are below."""

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
) -> FoundOrders:
    """Searches for orders."""

class MaskRuns:
    """A mask in runs of tokens with one word in one document."""

    def __init__(self, words: npt.NDArray[np.int64], documents: npt.NDArray[np.int32]) -> None: ...
    def work(self, block: int) -> npt.NDArray[np.int64]:
        """Visible pairs of each block of queries."""
    def tiles(
        self, rows: npt.NDArray[np.int64], query: int, key: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Tiles of blocks of queries that have a visible pair: offsets, columns, is_full, pairs."""

def turn_tiles(
    offsets: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int32],
    is_full: npt.NDArray[np.uint8],
    num_columns: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The same the other way: for each column its rows."""

def longest_first(work: npt.NDArray[np.int64], *, ranks: int, cap: int) -> npt.NDArray[np.int32]:
    """The rank of each piece of work, the largest first."""

def traded(
    work: npt.NDArray[np.int64], rank_of: npt.NDArray[np.int32], *, ranks: int, fineness: int
) -> npt.NDArray[np.int32]:
    """The rank of each piece after the heaviest ranks have traded pieces."""
