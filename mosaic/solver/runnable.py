"""Plans for the engine, by any method, with communication times.

*Over a network.* Searches minimize the prediction of Eq. 7, in which each module has the network to itself during
gradient reduction. The simulated step (``mosaic.simulate``) shares the network, but no search minimizes it. For several
devices ``auto`` therefore takes the plan with the shortest simulated step of:

1. ``exact``, or ``gahc`` if that cannot plan the problem;
2. the planners of whole devices, which are fast;
3. ``exact`` with gradient reductions twice as long, as if each shared the network with another;
4. starting from the best of these, ``exact`` with one module fixed to another degree, while the step gets shorter.

Counted work limits it. The record's bound is for predicted times; no simulated step is proven shortest.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost, exposed_ms
from mosaic.cost.protocol import RetimedCost
from mosaic.device import Device
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.simulate.step import simulate
from mosaic.solver.exact import why_not_exact
from mosaic.solver.limits import Countdown
from mosaic.solver.methods import method_of
from mosaic.solver.predict import retimed, with_communication
from mosaic.solver.solve import solve
from mosaic.solver.task import SearchOptions

DATA_PARALLEL = "data-parallel"
"""The method that needs no measured times."""
WHOLE_DEVICE_PLANNERS = ("distmm", "spindle", "megatron", "sequential")
FIRST_SHARE = 0.5
"""Share of the effort for the first plan."""
OTHER_SHARE = 0.25
"""Share of the remaining effort for each of the others."""
_SHARING = (1.0, 2.0)
"""Assumed number of modules on the network at a time."""
_SAME = 1e-6
"""Relative difference below which two steps count as equal."""


def check_method(method: str, plan: Plan | None = None) -> None:
    """Raises ValueError if the method is unknown, or passed beside a plan."""
    method_of(method)
    if plan is not None and method != "auto":
        raise ValueError(f"a passed plan needs no method: leave out the plan or method={method!r}")


def plan_to_run(
    method: str,
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    search: SearchOptions | None = None,
) -> Plan:
    """Plans by one method, and adds communication times.

    Modules stay whole unless ``search.layers`` is above 1. A plan with slices cannot run.

    Args:
        method: One of ``METHODS``. With a network between several devices, ``auto`` chooses by a simulated step. graph,
        cost, device, num_devices: As for ``solve``.
        search: Granularity and limits of the solvers; ``percents`` apply to ``sequential`` too.

    Raises:
        InfeasibleError: A module does not fit on any device, or no plan fits into memory.
        ValueError: The method is unknown or cannot plan this problem, or there is no device.
    """
    if method == "auto" and num_devices > 1 and isinstance(cost, RankedCost):
        return _plan_by_simulation(graph, cost, device, num_devices, search or SearchOptions())
    plan = solve(graph, cost, device, num_devices=num_devices, method=method, search=search)
    return with_communication(plan, cost) if isinstance(cost, RankedCost) else plan


class _Shared(RetimedCost):
    """A cost model with gradient reductions scaled by a factor, limited to some degrees."""

    def __init__(self, base: RankedCost, sharing: float) -> None:
        super().__init__(base)
        self._ranked, self._sharing = base, sharing
        self._degrees: Mapping[str, int] | None = None
        self._cached_ms = cache(self._shared_ms)  # searches with other degrees use the same times

    def at(self, degrees: Mapping[str, int]) -> _Shared:
        """Returns the model with one degree per module."""
        fixed = copy.copy(self)
        fixed._degrees = degrees
        return fixed

    def degrees(self, module: str) -> tuple[int, ...]:
        return self._ranked.degrees(module) if self._degrees is None else (self._degrees[module],)

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return self._cached_ms(module, phase, degree, quota)

    def _shared_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        base_ms = self._ranked.time_ms(module, phase, degree, quota)
        reduction = self._ranked.summed(module, degree)
        if phase is Phase.FORWARD or self._sharing == 1 or reduction.time_ms <= 0:
            return base_ms
        backward_ms = self._ranked.compute_ms(module, phase, degree, quota)
        shared, own = (exposed_ms(k * reduction.time_ms, backward_ms, reduction.buckets) for k in (self._sharing, 1))
        return base_ms + shared - own


def _plan_by_simulation(
    graph: ModuleGraph, cost: RankedCost, device: Device, num_devices: int, search: SearchOptions
) -> Plan:
    """Plans as ``auto`` does over a network; the record has the simulated step, and a bound of predicted steps."""
    start, countdown = time.perf_counter(), Countdown(search.limits)

    def plan(method: str, cost_of: Cost, share: float) -> Plan:
        limited = replace(search, limits=countdown.part(share), layers=1)  # only whole modules can run
        candidate = solve(graph, cost_of, device, num_devices=num_devices, method=method, search=limited)
        record = candidate.search
        if cost_of is not cost:  # its proof is for scaled times
            candidate, record = retimed(candidate, cost), replace(record, method="auto", status="feasible")
        candidate = with_communication(candidate, cost)
        step = simulate(candidate, graph, sums=cost.summed)
        return replace(candidate, search=replace(record, simulated_ms=step.makespan_ms))

    def shorter(best: Plan, method: str, cost_of: Cost) -> Plan:
        if countdown.left <= 0:
            return best
        try:
            other = plan(method, cost_of, OTHER_SHARE)
        except (InfeasibleError, UndecidedError, ValueError):
            return best  # this method cannot plan the problem
        return other if other.search.simulated_ms < best.search.simulated_ms * (1 - _SAME) else best

    first = best = plan("auto", cost, FIRST_SHARE)
    for method in WHOLE_DEVICE_PLANNERS:
        best = shorter(best, method, cost)
    if why_not_exact(graph) is None:
        models = [_Shared(cost, sharing) for sharing in _SHARING]
        best = shorter(best, "exact", models[-1])
        visited: set[tuple[int, ...]] = set()
        before = None
        while before is not best:
            before = best
            for name in graph.names:
                for degree in cost.degrees(name):
                    degrees = {placed.module: placed.degree for placed in best.placements} | {name: degree}
                    key = tuple(degrees[other] for other in graph.names)
                    if degree > num_devices or key in visited:
                        continue
                    visited.add(key)
                    for model in models:
                        best = shorter(best, "exact", model.at(degrees))
    record = replace(
        best.search,
        bound_ms=min(first.search.bound_ms, best.predicted_ms),
        seconds=time.perf_counter() - start,
    )
    return replace(best, sequential_ms=first.sequential_ms, search=record)
