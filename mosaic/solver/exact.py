"""The exact search of ``mosaic._search``.

Best-first search over sets of finished modules, with a search of its own for each stage (csrc/search). It minimizes the
sum over stages of the slowest forward plus the slowest backward, with interference.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mosaic import _search
from mosaic.cost import Cost
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.profile import Phase
from mosaic.solver.limits import SearchLimits
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.stage import Machine, StageResult

MAX_MODULES = 16
Options = Mapping[str, Sequence[DeploymentOption]]
_ROW = operator.attrgetter("degree", "quota", "forward_ns", "backward_ns", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best plan and its bound."""

    stages: tuple[StageResult, ...]
    """In topological order."""
    cost_ms: float
    """Predicted time, in milliseconds."""
    record: SearchRecord
    """Status and bound."""


def search_exactly(
    graph: ModuleGraph,
    options: Options,
    *,
    cost: Cost,
    machine: Machine,
    limits: SearchLimits | None = None,
    forbidden: Sequence[Collection[str]] = (),
) -> ExactResult:
    """Finds the plan with the least predicted time, and proves it optimal if ``limits`` allow.

    Args:
        graph: Modules and their dependencies.
        options: Deployment options of every module; not empty.
        cost: Source of interference.
        machine: Devices to place on.
        limits: Limits of the search.
        forbidden: Sets of modules that must not be stages.

    Raises:
        ValueError: There are more than 16 modules.
        InfeasibleError: No plan avoids the forbidden stages.
    """
    limits = limits or SearchLimits()
    names = graph.topological_order()
    place = {name: index for index, name in enumerate(names)}
    plan = _search.plan(
        build_problem(graph, options, cost=cost, machine=machine),
        effort=limits.effort,
        seconds=limits.seconds,
        forbidden=[sum(1 << place[name] for name in members) for members in forbidden],
        should_stop=limits.should_stop,
    )
    if not plan.stages:
        sets = "; ".join(", ".join(sorted(members)) for members in forbidden)
        raise InfeasibleError("no plan avoids the forbidden stages", reasons=[f"forbidden stages: {sets}"])
    return ExactResult(
        stages=tuple(
            StageResult(
                latency_ns=stage.latency_ns,
                choices={
                    names[at]: (options[names[at]][option], devices) for at, option, devices in sorted(stage.rows)
                },
            )
            for stage in plan.stages
        ),
        cost_ms=plan.cost_ns / NS_PER_MS,
        record=SearchRecord(
            method="exact",
            status="optimal" if plan.status == "optimal" else "feasible",
            bound_ms=plan.bound_ns / NS_PER_MS,
        ),
    )


def why_not_exact(graph: ModuleGraph) -> str | None:
    """Returns the reason why the exact search cannot plan a graph, or None."""
    if len(graph.modules) > MAX_MODULES:
        return f"the exact search takes at most {MAX_MODULES} modules, not {len(graph.modules)}"
    return None


def build_problem(graph: ModuleGraph, options: Options, *, cost: Cost, machine: Machine) -> _search.Problem:
    """Returns the problem in the extension's types, with modules in topological order."""
    form = cost.interference
    names = graph.topological_order()
    place = {name: index for index, name in enumerate(names)}
    problem = _search.Problem(
        [
            _search.Module(
                [_ROW(option) for option in options[name]], [place[other] for other in graph.predecessors(name)]
            )
            for name in names
        ],
        num_devices=machine.num_devices,
        num_slots=machine.num_slots,
        memory_bytes=machine.memory_bytes,
    )
    if not form.is_zero:
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
