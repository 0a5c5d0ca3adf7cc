"""Planning's hot loops: the exact search over stages, and the heuristic that it starts from.

Plain C++, no CUDA, the GIL released; the same input and seed give the same answer while no wall-clock limit ends the
search. Times are nanoseconds. ``ValueError`` for what no search can work on.
"""

from collections.abc import Mapping, Sequence

class Option:
    """One way to deploy a module; times in nanoseconds."""

    def __init__(
        self,
        *,
        degree: int,
        quota: int,
        forward_ns: int,
        backward_ns: int,
        memory_bytes: int = 0,
        forward_bandwidth: float = 0.0,
        backward_bandwidth: float = 0.0,
        idle: tuple[float, float] = (0.0, 0.0),
        cap: tuple[float, float] = (0.0, 0.0),
    ) -> None: ...

class Module:
    """A module's options, and the modules that must be in an earlier stage."""

    def __init__(self, options: Sequence[Option], before: Sequence[int]) -> None: ...
    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int, int]], before: Sequence[int]) -> Module:
        """From (degree, quota, forward_ns, backward_ns, memory_bytes): many options at once."""
    def after(self, before: Sequence[int]) -> Module:
        """The same options after other modules."""

class Problem:
    """What is to be planned."""

    def __init__(
        self,
        modules: Sequence[Module],
        *,
        num_devices: int,
        num_slots: int,
        memory_bytes: int = 0,
        objective: str = "phases",
    ) -> None: ...
    def disturb_by_pairs(
        self, forward_ns: Sequence[Sequence[Sequence[int]]], backward_ns: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Adds, for each module and option, what neighbour n at quota q costs: entry n * (num_slots + 1) + q."""
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
    def disturb_by_level(self, forward: tuple[float, float, float], backward: tuple[float, float, float]) -> None:
        """Adds what is lost where bandwidth runs out: capacity, fairness, cache, with ``idle`` and ``cap`` by phase."""

class Placed:
    """A module in a stage."""

    @property
    def module(self) -> int: ...
    @property
    def option(self) -> int:
        """Index among the module's options."""
    @property
    def devices(self) -> list[int]: ...
    @property
    def starts(self) -> list[int]:
        """First slot on each of the devices."""

class Stage:
    """Modules side by side."""

    @property
    def forward_ns(self) -> int: ...
    @property
    def backward_ns(self) -> int: ...
    @property
    def latency_ns(self) -> int: ...
    @property
    def placed(self) -> list[Placed]: ...
    @property
    def rows(self) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """(module, option, devices, starts) of each: many values at once."""

class Known:
    """What a search found out about sets of modules."""

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
    def known(self) -> Known:
        """For a later search of a problem with modules of this one."""
    @property
    def num_evaluations(self) -> int: ...
    @property
    def num_expanded(self) -> int: ...
    @property
    def seconds(self) -> float: ...

def plan(
    problem: Problem,
    *,
    seconds: float = 10.0,
    max_nodes: int = 2000000,
    max_edges: int = 20000000,
    kicks: int = 30,
    seed: int = 0,
    exact: bool = True,
    patterns: bool = False,
    start: Sequence[int] = (),
    forbidden: Sequence[int] = (),
    known: Known | None = None,
    places: Sequence[int] = (),
) -> Plan:
    """Searches for the best plan.

    Sets of modules are bitmasks. The search starts from the partition ``start`` where it is given and fits, uses no set
    of ``forbidden`` as a stage, and takes from ``known`` what holds here too: ``places`` has the index that each
    module had there, or -1. ``patterns``: few modules are searched as many are, by prices and patterns first.
    """

def together(problem: Problem, modules: int) -> int:
    """The least that a set of modules takes side by side as far as area tells; INT64_MAX // 4 where it does not fit."""

def improve_by_pairs(
    problem: Problem, start: Sequence[int], *, kicks: int = 30, seed: int = 0, seconds: float = 10.0
) -> tuple[list[int], int]:
    """Plans pairs of stages of a partition anew until ``kicks`` in a row bring nothing.

    Returns the stages, as bitmasks in no order, and what they take in nanoseconds.
    """

def bound_by_order(problem: Problem, *, incumbent: int = ..., seconds: float = 10.0) -> tuple[int, int]:
    """What no plan takes less than, in nanoseconds: by prices of modules alone, and with the order of stages.

    The second is no more than ``incumbent``; without a limit of time that counts, both are the same each time.
    """

def pack_by_quota(
    problem: Problem,
    modules: int,
    *,
    forward: int = ...,
    backward: int = ...,
    latency: int = ...,
    max_nodes: int = ...,
) -> tuple[str, list[tuple[int, int, list[int], list[int]]], int]:
    """Whether a set of modules (a bitmask) fits side by side with options that meet these times, in nanoseconds.

    Looks at one quota after the other; disturbance is left out. Returns ``yes``, ``no``, or ``open`` where nodes ran
    out or memory ruled out what was found; for ``yes`` each module with its option, devices and first slots on them;
    and how many nodes it took.
    """

def list_patterns(problem: Problem, slack: int, *, most: int = 300000) -> tuple[list[int], dict[int, int], bool]:
    """Prices of modules; and sets, as bitmasks, that take by area less than ``slack`` above what theirs add up to.

    Returns the prices, what each of those sets takes at least (all in nanoseconds), and whether all are listed: not
    where there are more than ``most``.
    """

def cheapest_partitions(
    problem: Problem, columns: Mapping[int, int], slack: int, raises: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, list[int]]]:
    """The cheapest partition of all modules into stages of ``columns``, if it costs less than ``slack``.

    ``columns`` has the cost of each stage, a bitmask. It is asked again after each of ``raises``, each of which makes a
    stage dearer. Returns for each question what no partition is below (``slack`` at most), and the stages in an order
    that keeps dependencies, or none.
    """
