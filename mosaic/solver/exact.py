"""The exact search: ``mosaic._search`` asked with the options of a graph, and its answer as stages.

Best-first over the sets of finished modules, with a special-purpose search for each stage (csrc/search). It minimises
what a plan predicts: the slowest forward plus the slowest backward of each stage, with interference.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.cost import Cost, Eq8, Eq8Interference
from mosaic.cost.interference import PairShares
from mosaic.errors import BackendUnavailableError, InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.profile import Phase
from mosaic.search_extension import load_search
from mosaic.solver.limits import SearchLimits
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.stage import Machine, StageResult

if TYPE_CHECKING:
    from mosaic import _search

MAX_MODULES = 16
Options = Mapping[str, Sequence[DeploymentOption]]
_ROW = operator.attrgetter("degree", "quota", "forward_ns", "backward_ns", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best plan found and its bound."""

    stages: tuple[StageResult, ...]
    """In an order that keeps the dependencies."""
    cost_ms: float
    """Predicted time, in milliseconds."""
    record: SearchRecord
    """The status, the bound, and the extent of the search."""


def search_exactly(
    graph: ModuleGraph,
    options: Options,
    *,
    cost: Cost,
    machine: Machine,
    limits: SearchLimits | None = None,
    forbidden: Sequence[Collection[str]] = (),
) -> ExactResult:
    """Finds the plan with the least predicted time, and proves it where ``limits`` allow.

    Args:
        graph: What depends on what.
        options: Deployment options of every module; not empty.
        cost: Asked for interference only.
        machine: Devices to place on.
        limits: When to stop.
        forbidden: Sets of modules that must not be stages.

    Raises:
        ValueError: More than 16 modules, or an interference that this search does not know.
        InfeasibleError: What is forbidden leaves no plan.
        BackendUnavailableError: The extension is not built.
    """
    search = load_search()
    limits = limits or SearchLimits()
    names = graph.topological_order()
    place = {name: index for index, name in enumerate(names)}
    plan: _search.Plan = search.plan(
        build_problem(graph, options, cost=cost, machine=machine),
        effort=limits.effort,
        seconds=limits.seconds,
        forbidden=[sum(1 << place[name] for name in members) for members in forbidden],
        should_stop=limits.should_stop,
    )
    if not plan.stages:
        sets = "; ".join(", ".join(sorted(members)) for members in forbidden)
        raise InfeasibleError("what is forbidden leaves no plan", reasons=[f"no stage may be one of: {sets}"])
    return ExactResult(
        stages=tuple(_stage(stage, names, options) for stage in plan.stages),
        cost_ms=plan.cost_ns / NS_PER_MS,
        record=SearchRecord(
            method="exact",
            num_evaluations=plan.num_evaluations,
            status="optimal" if plan.status == "optimal" else "feasible",
            bound_ms=plan.bound_ns / NS_PER_MS,
        ),
    )


def why_not_exact(graph: ModuleGraph, cost: Cost) -> str | None:
    """Returns why the exact search cannot plan a graph with these costs; None if it can."""
    if len(graph.modules) > MAX_MODULES:
        return f"{len(graph.modules)} modules are more than the {MAX_MODULES} that the exact search takes"
    if not cost.interference.is_zero and (reason := _why_not_searched(graph, cost)) is not None:
        return reason
    try:
        load_search()
    except BackendUnavailableError as error:
        return str(error)
    return None


def _why_not_searched(graph: ModuleGraph, cost: Cost) -> str | None:
    """Returns why an interference cannot be searched exactly; None if it can."""
    form = cost.interference
    if isinstance(form, PairShares):
        return None
    if not isinstance(form, Eq8Interference):
        return f"{type(form).__name__} is neither a sum over pairs nor Eq. 8, the forms that the exact search knows"
    for name in graph.names:
        quotas = sorted({quota for degree in cost.degrees(name) for quota in cost.quotas(name, degree)})
        for phase in Phase:
            shares = [_share(form, name, phase, quota) for quota in quotas]
            if any(later < earlier for earlier, later in itertools.pairwise(shares)):
                return (
                    f"{name!r} draws less bandwidth at a larger quota ({phase}), which the exact search cannot prune by"
                )
    return None


def build_problem(graph: ModuleGraph, options: Options, *, cost: Cost, machine: Machine) -> _search.Problem:
    """Returns the problem as the extension has it; modules in topological order."""
    search, form = load_search(), cost.interference
    if not form.is_zero and (reason := _why_not_searched(graph, cost)) is not None:
        raise ValueError(f"{reason}; use method='gahc', or interference='pairwise' or 'eq8'")
    names = graph.topological_order()
    place = {name: index for index, name in enumerate(names)}
    modules = []
    for name in names:
        drawn = []  # shares of bandwidth of each option, by phase, for Eq. 8
        if isinstance(form, Eq8Interference) and not form.is_zero:
            drawn = [tuple(_share(form, name, phase, option.quota) for phase in Phase) for option in options[name]]
        before = [place[other] for other in graph.predecessors(name)]
        modules.append(search.Module([_ROW(option) for option in options[name]], before, drawn))
    problem: _search.Problem = search.Problem(
        modules,
        num_devices=machine.num_devices,
        num_slots=machine.num_slots,
        memory_bytes=machine.memory_bytes,
    )
    if isinstance(form, Eq8Interference) and not form.is_zero:
        by_phase = (form.coefficients.get(phase, Eq8(e1=0.0)) for phase in Phase)
        problem.disturb_by_bandwidth(*((e.e1 * NS_PER_MS, e.e2 * NS_PER_MS, e.e3 * NS_PER_MS) for e in by_phase))
    elif isinstance(form, PairShares) and not form.is_zero:
        quotas = [sorted({option.quota for option in options[name]}) for name in names]
        problem.disturb_by_shares(
            *(
                [
                    (own, other, rows)
                    for own, name in enumerate(names)
                    for other, beside in enumerate(names)
                    if own != other and (rows := form.table(name, beside, phase, quotas[own], quotas[other]))
                ]
                for phase in Phase
            )
        )
    return problem


def _share(form: Eq8Interference, name: str, phase: Phase, quota: int) -> float:
    return form.share(name, phase, quota) if phase in form.coefficients else 0.0


def _stage(stage: _search.Stage, names: Sequence[str], options: Options) -> StageResult:
    rows = sorted(stage.rows)  # by module
    return StageResult(
        latency_ns=stage.latency_ns,
        choices={names[m]: (options[names[m]][option], devices) for m, option, devices, _ in rows},
        starts={names[m]: starts for m, _, _, starts in rows},
    )
