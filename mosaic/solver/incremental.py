"""A changed task set, batch or number of devices, planned from what is known of the one before.

Two things are carried over. The stages of the earlier plan are where the search starts: modules that are gone are
dropped, new ones are put where the descent finds them best. And what the earlier search found out about sets of modules
holds for every set whose options are unchanged, on the same devices.

The proof is what takes long, and it is no shorter from a good start. So a re-plan gets a share of the time that a
cold search took, or may take: within it, it proves what it can, and otherwise returns the best plan with a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.exact import Knowledge, SearchHint, SearchLimits
from mosaic.solver.remembered import Remembered
from mosaic.solver.solve import SearchOptions, solve_with_hint

WARM_SHARE = 0.08
"""Share of the earlier search's time that a re-plan's search may take."""
LEAST_SECONDS = 0.25
"""What it may always take: where cores are busy, a tenth of a quick cold search is over before a proof is."""


def resolve(
    previous: Plan,
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int | None = None,
    search: SearchOptions | None = None,
    known: Knowledge | None = None,
) -> Plan:
    """Plans a graph from the plan of one that has modules in common with it.

    Args:
        previous: For other modules, another batch (another ``cost``) or another number of devices.
        graph: What to place now.
        cost: Its costs.
        device: What one of the devices is now.
        num_devices: How many there are now; as many as before where None.
        search: How to search; its limits hold as they are. By default ``warm_limits(previous)``.
        known: Of the earlier search.

    Returns:
        The plan of a cold ``solve`` with ``method='exact'``, as far as its time: where both are proven best, both are
        predicted to take the same time.

    Raises:
        ValueError, InfeasibleError, BackendUnavailableError: As ``solve``.
    """
    search = search or SearchOptions(limits=warm_limits(previous))
    hint = SearchHint(start=start_from(previous, graph), known=known)
    devices = previous.num_devices if num_devices is None else num_devices
    return solve_with_hint(graph, cost, device, num_devices=devices, search=search, hint=hint)[0]


def warm_limits(previous: Plan) -> SearchLimits:
    """Returns limits within a tenth of what the earlier search took: the rest is for what is not search."""
    return _warm(previous.search.seconds, seed=0)


def _warm(cold_seconds: float, *, seed: int) -> SearchLimits:
    return SearchLimits(seconds=max(LEAST_SECONDS, WARM_SHARE * cold_seconds), kicks=3, seed=seed)


def start_from(previous: Plan, graph: ModuleGraph) -> tuple[tuple[str, ...], ...]:
    """Returns the stages of a plan without modules that are gone, and each new module in a stage of its own.

    Where the new dependencies contradict the old stages, a module moves to a later stage.
    """
    old = {p.module: 2 * index + 1 for index, stage in enumerate(previous.stages) for p in stage.placements}
    order = graph.topological_order()
    before: dict[str, list[str]] = {name: [] for name in order}
    for edge in graph.edges:
        before[edge.target].append(edge.source)
    level: dict[str, int] = {}
    groups: dict[tuple[int, str], list[str]] = {}
    for name in order:
        after = max([level[other] for other in before[name]], default=-1) + 1
        own = level[name] = max(old.get(name, 0), after)
        alone = "" if name in old else name  # just after what feeds it
        groups.setdefault((own, alone), []).append(name)
    return tuple([tuple(groups[key]) for key in sorted(groups)])


@dataclass
class Replanner:
    """Plans one graph after another on the same kind of device, and keeps what its searches found out.

    Attributes:
        plan: The latest plan; None before the first.
    """

    device: Device
    """What one of the devices is."""
    num_devices: int = 1
    """How many of them."""
    search: SearchOptions = field(default_factory=SearchOptions)
    """How the first plan is searched for."""
    plan: Plan | None = field(default=None, init=False)
    _known: Knowledge | None = field(default=None, init=False, repr=False)
    _remembered: Remembered = field(default_factory=Remembered, init=False, repr=False)
    _cold_seconds: float = field(default=0.0, init=False, repr=False)

    def update(
        self,
        graph: ModuleGraph,
        cost: Cost,
        *,
        device: Device | None = None,
        num_devices: int | None = None,
        limits: SearchLimits | None = None,
    ) -> Plan:
        """Plans a graph: from nothing the first time, and then from what is known.

        Args:
            graph: What to place now.
            cost: Its costs; may differ from the ones before, but is not changed in place.
            device: What one of the devices is from now on; as before where None.
            num_devices: How many of them there are from now on; as many as before where None.
            limits: What ends this search; by default those of ``search`` the first time, then a tenth of its time.

        Raises:
            ValueError, InfeasibleError, UndecidedError, BackendUnavailableError: As ``solve``. The plan stays as it
                was, and what is known stays usable.
        """
        self.device = device or self.device
        self.num_devices = self.num_devices if num_devices is None else num_devices
        search, hint = self.search, None
        if self.plan is not None:
            hint = SearchHint(start=start_from(self.plan, graph), known=self._known)
            search = replace(search, limits=_warm(self._cold_seconds, seed=search.limits.seed))
        if limits is not None:
            search = replace(search, limits=limits)
        self.plan, self._known = solve_with_hint(
            graph,
            cost,
            self.device,
            num_devices=self.num_devices,
            search=search,
            hint=hint,
            remembered=self._remembered,
        )
        self._cold_seconds = max(self._cold_seconds, self.plan.search.seconds)
        return self.plan
