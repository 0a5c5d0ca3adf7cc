"""A changed task set, batch or number of devices, planned from what is known of the one before.

What is carried over: the stages of the earlier plan, without modules that are gone, are where the search starts, and
new modules are put where they cost least; and what the earlier search found out about sets of modules holds for every
set whose options are unchanged, on the same devices.

To prove that takes as long as ever: a good start does not shorten it. So a re-plan has a share of the effort that a
cold search took. What it does not prove with it has a bound, and ``Replanner.prove`` goes on from there when there is
time, such as while the re-planned step already trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.exact.search import Countdown, Knowledge, SearchHint, SearchLimits
from mosaic.solver.replan.remembered import Remembered
from mosaic.solver.solve import find_solution
from mosaic.solver.task import SearchOptions

WARM_SHARE = 0.07
"""Share of the earlier search's effort that a re-plan's search may take."""
MIN_EFFORT = 0.02
"""What it may always take: nobody waits for less, and most small graphs are proven within it."""
MIN_EFFORT_A_MODULE = 0.005
"""The same for each of more than ``FEW_MODULES``: large stages that lost or got a module are packed anew."""
FEW_MODULES = 20


def warm_limits(cold_effort: float, *, num_modules: int, seed: int) -> SearchLimits:
    """Limits of ``WARM_SHARE`` of what the largest search took: a choice, so how long a re-plan takes is no result."""
    least = MIN_EFFORT if num_modules <= FEW_MODULES else MIN_EFFORT_A_MODULE * num_modules
    return SearchLimits(effort=max(least, WARM_SHARE * cold_effort), seed=seed)


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
    _cold_effort: float = field(default=0.0, init=False, repr=False)
    _planned: tuple[ModuleGraph, Cost] | None = field(default=None, init=False, repr=False)

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
            limits: What ends this search; by default those of ``search`` the first time, then ``WARM_SHARE`` of its
                effort.

        Raises:
            ValueError, InfeasibleError, UndecidedError, BackendUnavailableError: As ``solve``. The plan stays as it
                was, and what is known stays usable.
        """
        self.device = device or self.device
        self.num_devices = self.num_devices if num_devices is None else num_devices
        search, hint = self.search, None
        if self.plan is not None:
            hint = SearchHint(start=start_from(self.plan, graph), known=self._known)
            search = replace(
                search, limits=warm_limits(self._cold_effort, num_modules=len(graph.names), seed=search.limits.seed)
            )
        if limits is not None:
            search = replace(search, limits=limits)
        countdown = Countdown(search.limits)
        found = find_solution(
            graph,
            cost,
            self.device,
            num_devices=self.num_devices,
            search=search,
            hint=hint,
            remembered=self._remembered,
        )
        self.plan, self._known = found.plan, found.known
        self._planned = graph, cost
        self._cold_effort = max(self._cold_effort, countdown.spent)
        return self.plan

    def prove(self, *, limits: SearchLimits | None = None) -> Plan:
        """Searches on for the graph of the latest plan, until that is proven best or limits end it.

        Args:
            limits: What ends the search; those of ``search`` where None.

        Returns:
            The plan, which is also ``plan`` now: the same one where it was proven before, never one that is predicted
            slower, and a better one where there is one.

        Raises:
            ValueError: There is no plan yet.
        """
        if self._planned is None or self.plan is None:
            raise ValueError("there is no plan to prove yet; call update() first")
        before = self.plan
        if before.search.status == "optimal":
            return before
        found = self.update(*self._planned, limits=limits or self.search.limits)
        if found.predicted_ms > before.predicted_ms:  # spare slots may have made more of the earlier stages
            self.plan = before
        return self.plan
