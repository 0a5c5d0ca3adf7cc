"""A plan for several devices, chosen by a simulated step in which the modules of a device share its network.

Every search minimises what Eq. 7 predicts, and there each module has the network to itself while its gradients are
summed. The simulated step (``mosaic.simulate``) knows better, but no search here can minimise it. So plans are made in
several ways, and the one whose simulated step is shortest is chosen:

1. by ``exact``, or ``gahc`` where that cannot search the problem;
2. by ``exact`` with each sum twice as long, which is what a module meets that shares the network with one other;
3. by the planners of whole devices that answer soon;
4. from the best of these on, by ``exact`` with one module held to another degree, as long as the step gets shorter.

What is proven is Eq. 7's: the bound of the record is one for predicted times, and ``optimal`` stands there only where
the plan that was chosen is the one that ``exact`` proved. That no other plan's simulated step is shorter is not proven.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost, exposed_ms
from mosaic.cost.protocol import RetimedCost
from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.simulate.step import simulate
from mosaic.solver.exact.search import Countdown, SearchHint, why_not_exact
from mosaic.solver.predict import retimed, with_communication
from mosaic.solver.solve import find_solution
from mosaic.solver.task import SearchOptions

WHOLE_DEVICE_PLANNERS = ("distmm", "spindle-optimus", "megatron", "sequential")
"""Whose plans are looked at, too."""
FIRST_SHARE = 0.5
"""Of the effort, for the first plan."""
OTHER_SHARE = 0.25
"""Of the effort that is left, for each of the others."""
_SHARING = (1.0, 2.0)
"""Modules that are taken to be on the network at a time."""
_SAME = 1e-6
"""Share of a step below which two are equally long."""


class _Shared(RetimedCost):
    """A cost model for ranks whose sums of gradients take a multiple of their time, at some of its degrees."""

    def __init__(self, base: RankedCost, sharing: float, degrees: Mapping[str, int] | None = None) -> None:
        super().__init__(base)
        self._ranked = base
        self._sharing = sharing
        self._degrees = degrees

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the one degree that the module is held to, or all."""
        return self._ranked.degrees(module) if self._degrees is None else (self._degrees[module],)

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone, in which more or less of the sum is hidden."""
        base_ms = self._ranked.time_ms(module, phase, degree, quota)
        whole = self._ranked.summed(module, degree)
        if phase is Phase.FORWARD or self._sharing == 1 or whole.time_ms <= 0:
            return base_ms
        backward_ms = self._ranked.compute_ms(module, phase, degree, quota)
        shared, own = (exposed_ms(k * whole.time_ms, backward_ms, whole.buckets) for k in (self._sharing, 1))
        return base_ms + shared - own


def plan_for_shared_network(
    graph: ModuleGraph,
    cost: RankedCost,
    device: Device,
    *,
    num_devices: int,
    search: SearchOptions | None = None,
    hint: SearchHint | None = None,
) -> Plan:
    """Plans in several ways, and returns the plan whose simulated step on the shared network is shortest.

    Raises:
        InfeasibleError, UndecidedError, ValueError: As ``solve``.
    """
    search = search or SearchOptions()
    choice = _Choice(graph=graph, cost=cost, device=device, num_devices=num_devices, search=search)
    return choice.run(hint)


@dataclass
class _Choice:
    graph: ModuleGraph
    cost: RankedCost
    device: Device
    num_devices: int
    search: SearchOptions
    num_evaluations: int = field(default=0, init=False)

    def run(self, hint: SearchHint | None) -> Plan:
        began = time.perf_counter()
        self._countdown = Countdown(self.search.limits)
        first = best = self._plan("auto", self.cost, FIRST_SHARE, hint)
        for method in WHOLE_DEVICE_PLANNERS:
            best = self._shorter(best, method, self.cost)
        if why_not_exact(self.graph, self.cost) is None:
            best = self._climb(self._shorter(best, "exact", _Shared(self.cost, max(_SHARING))))
        record = replace(
            best.search,
            bound_ms=min(first.search.bound_ms, best.predicted_ms),
            num_evaluations=self.num_evaluations,
            seconds=time.perf_counter() - began,
        )
        return replace(best, sequential_ms=first.sequential_ms, search=record)

    def _climb(self, best: Plan) -> Plan:
        """Holds modules to the degrees of the best plan but for one, which tries all others, while that is better."""
        tried: set[tuple[int, ...]] = set()
        before = None
        while before is not best:
            before = best
            for name in self.graph.names:
                for degree in self.cost.degrees(name):
                    degrees = {placed.module: placed.degree for placed in best.placements} | {name: degree}
                    key = tuple(degrees[one] for one in self.graph.names)
                    if degree > self.num_devices or key in tried:
                        continue
                    tried.add(key)
                    for sharing in _SHARING:
                        best = self._shorter(best, "exact", _Shared(self.cost, sharing, degrees))
        return best

    def _shorter(self, best: Plan, method: str, cost: Cost) -> Plan:
        """Returns the best plan or another one, whose simulated step is shorter; the best when the effort is spent."""
        if self._countdown.left <= 0:
            return best
        try:
            other = self._plan(method, cost, OTHER_SHARE)
        except (BackendUnavailableError, InfeasibleError, UndecidedError, ValueError):
            return best  # one fewer to choose from
        return other if other.search.simulated_ms < best.search.simulated_ms * (1 - _SAME) else best

    def _plan(self, method: str, cost: Cost, share: float, hint: SearchHint | None = None) -> Plan:
        """Plans by one method, and says what a simulated step of the plan takes."""
        limits = self._countdown.part(share)
        plan = find_solution(
            self.graph,
            cost,
            self.device,
            num_devices=self.num_devices,
            method=method,
            search=replace(self.search, limits=limits),
            hint=hint,
        ).plan
        self.num_evaluations += plan.search.num_evaluations
        record = plan.search
        if cost is not self.cost:  # what is proven holds for other times
            plan = retimed(plan, self.cost)
            record = replace(record, method="auto", status="feasible")
        plan = with_communication(plan, self.cost)
        step = simulate(plan, self.graph, sums=self.cost.summed)
        return replace(plan, search=replace(record, simulated_ms=step.makespan_ms))
