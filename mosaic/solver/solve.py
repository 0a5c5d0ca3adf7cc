"""From a graph, a cost model and a device to a plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, Stage
from mosaic.solver.brute_force import enumerate_plans
from mosaic.solver.exact import SearchLimits, search_exactly
from mosaic.solver.gahc import cluster
from mosaic.solver.options import QuotaGrid, all_options
from mosaic.solver.placement import Machine
from mosaic.solver.predict import build_stage
from mosaic.solver.sequential import one_by_one
from mosaic.solver.spare import spend_spare_slots
from mosaic.solver.stage_eval import StageEvaluator, StageResult
from mosaic.solver.stagger import stagger

METHODS = ("exact", "gahc", "sequential", "brute_force")
"""Names of the solvers."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search; every part can be switched off, to measure what it is worth."""

    grid: QuotaGrid = field(default_factory=QuotaGrid)
    """Quotas to consider; by default every slot."""
    prune: bool = True
    """Algorithm 1, line 11: drop merges that cannot beat the best so far."""
    cache: bool = True
    """Evaluate a set of modules only once."""
    use_spare_slots: bool = True
    """Give slots that a stage leaves idle to the modules that gain from them; Algorithm 1 does not."""
    deterministic_limit: float = 1.0
    """Effort for one CP-SAT question, in its deterministic time (about seconds)."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    """What ends an exact search."""


def solve(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    method: str = "gahc",
    search: SearchOptions | None = None,
) -> Plan:
    """Plans which modules run side by side, and on which slots of which devices.

    The plan is never predicted slower than the sequential one: a stage that brings nothing is split into its
    modules, whatever the method. The same input gives the same plan.

    Args:
        graph: What to place.
        cost: Times, memory and interference.
        device: What one of the devices is.
        num_devices: How many of them.
        method: ``exact`` (proven best in ``Plan.predicted_ms``, or the best found and a bound), ``gahc`` (the
            paper's Algorithm 1), ``sequential``, or ``brute_force`` (at most six modules on two devices).
        search: Granularity and ablations.

    Raises:
        InfeasibleError: A module fits on no device; names it, what it needs and what there is.
        ValueError: There are no devices, no such method, or the cost model gives a negative time.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan needs at least one device")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not a solver; use one of {', '.join(METHODS)}")
    began = time.perf_counter()
    search = search or SearchOptions()
    options = all_options(graph, cost=cost, device=device, num_devices=num_devices, grid=search.grid)
    machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
    evaluator = StageEvaluator(options, cost=cost, machine=machine, deterministic_limit=search.deterministic_limit)
    in_turn = one_by_one(graph, evaluator)
    if method == "gahc":
        found, record = _run_gahc(graph, evaluator, search)
    elif method == "exact":
        proven = search_exactly(graph, options, cost=cost, machine=machine, limits=search.limits)
        found, record = proven.stages, proven.record
    elif method == "brute_force":
        exact = enumerate_plans(graph, options, cost=cost, machine=machine)
        found, record = exact.stages, SearchRecord(method=method, num_evaluations=exact.num_evaluations)
    else:
        found, record = in_turn, SearchRecord(method=method, num_evaluations=len(in_turn))
    if search.use_spare_slots and method in ("exact", "gahc"):
        found = tuple(spend_spare_slots(stage, options, cost=cost, machine=machine) for stage in found)
    sequential = tuple(build_stage(stage, cost) for stage in in_turn)
    plan = Plan(
        device=device,
        num_devices=num_devices,
        stages=stagger(
            _keep_gains(tuple(build_stage(stage, cost) for stage in found), sequential),
            num_devices=num_devices,
            num_slots=device.num_slots,
        ),
        graph=graph.fingerprint,
        profile=cost.profile_fingerprint,
        sequential_ms=_predicted_ms(sequential),
        search=replace(record, seconds=time.perf_counter() - began),
    )
    plan.check_covers(graph)
    return plan


def _keep_gains(stages: tuple[Stage, ...], sequential: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Splits every stage that is predicted no faster than its modules in turn.

    Algorithm 1 judges a merge by the slowest module's forward and backward together; a loop has a slowest
    forward and a slowest backward, which may be two modules.
    """
    alone = {stage.names[0]: stage for stage in sequential}
    kept: list[Stage] = []
    for stage in stages:
        apart = [alone[name] for name in stage.names]
        kept.extend([stage] if _predicted_ms([stage]) < _predicted_ms(apart) else apart)
    # Sums in another order may differ in the last bit.
    return tuple(kept) if _predicted_ms(kept) < _predicted_ms(sequential) else sequential


def _run_gahc(
    graph: ModuleGraph, evaluator: StageEvaluator, search: SearchOptions
) -> tuple[tuple[StageResult, ...], SearchRecord]:
    result = cluster(graph, evaluator, prune=search.prune, cache=search.cache)
    if evaluator.num_unresolved:
        _log.warning(
            "CP-SAT gave up %d questions at deterministic_limit=%g; a higher limit may find a better plan",
            evaluator.num_unresolved,
            search.deterministic_limit,
        )
    return result.stages, SearchRecord(
        method="gahc",
        num_evaluations=result.num_evaluations,
        num_cache_hits=result.num_cache_hits,
        num_pruned=result.num_pruned,
        num_sat_calls=evaluator.num_sat_calls,
    )


def _predicted_ms(stages: Sequence[Stage]) -> float:
    return sum(stage.forward_ms + stage.backward_ms for stage in stages)
