"""From a graph, a cost model and a device to a plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, Stage
from mosaic.solver.brute_force_held import enumerate_held_plans
from mosaic.solver.exact.brute_force import enumerate_plans
from mosaic.solver.exact.search import (
    Knowledge,
    Objective,
    SearchHint,
    SearchLimits,
    search_exactly,
    why_not_exact,
)
from mosaic.solver.gahc.clustering import cluster
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.gahc.stage_eval import StageEvaluator, StageResult
from mosaic.solver.memory.holding import fits, place_anew, swap_labels
from mosaic.solver.memory.options import alone_within_memory
from mosaic.solver.memory.search import search_within_memory
from mosaic.solver.options import DeploymentOption, QuotaGrid
from mosaic.solver.replan.remembered import Answer, Remembered

METHODS = ("auto", "exact", "gahc", "sequential", "brute_force")
"""Names of the solvers."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search; every part can be switched off, to measure what it is worth."""

    grid: QuotaGrid = field(default_factory=QuotaGrid)
    """Quotas to consider; by default every slot."""
    objective: Objective = "phases"
    """What an exact search minimises: ``phases``, each stage's slowest forward plus its slowest backward, which is what
    a plan predicts; or ``sum``, the paper's Eq. 4."""
    prune: bool = True
    """Algorithm 1, line 11: drop merges that cannot beat the best so far."""
    cache: bool = True
    """Evaluate a set of modules only once."""
    use_spare_slots: bool = True
    """Give slots that a stage leaves idle to the modules that gain from them; Algorithm 1 does not."""
    stagger: bool = True
    """Choose slots so that modules can start before the stage before has ended everywhere."""
    deterministic_limit: float = 1.0
    """Effort for one CP-SAT question, in its deterministic time (about seconds)."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    """What ends an exact search."""
    hold_memory: bool = True
    """No device is given more than it has over the whole step, with what modules of all stages keep there
    (``holding.py``); otherwise each stage's memory is checked alone."""


def solve(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    method: str = "auto",
    search: SearchOptions | None = None,
) -> Plan:
    """Plans which modules run side by side, and on which slots of which devices.

    The plan is never predicted slower than the sequential one: a stage that brings nothing is split into its
    modules, whatever the method. The same input gives the same plan, unless a time limit ends the search.

    Args:
        graph: What to place.
        cost: Times, memory and interference.
        device: What one of the devices is.
        num_devices: How many of them.
        method: ``exact`` (proven best in ``Plan.predicted_ms``, or the best found and a bound), ``gahc`` (the
            paper's Algorithm 1), ``sequential``, ``brute_force`` (at most six modules on two devices), or ``auto``:
            ``exact`` where it can search this problem, otherwise ``gahc`` with a warning that says why. The plan's
            record has the method that was used.
        search: Granularity, limits and ablations.

    Raises:
        InfeasibleError: There is no plan: a module fits on no device (names it, what it needs and what there is), or
            devices do not hold what all modules keep.
        UndecidedError: No plan was found that devices hold, and it is not proven that there is none.
        BackendUnavailableError: ``exact`` was asked for and its extension is not built.
        ValueError: There are no devices, no such method, the method cannot search this problem, or the cost model
            gives a negative time.
    """
    return solve_with_hint(graph, cost, device, num_devices=num_devices, method=method, search=search)[0]


def solve_with_hint(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    method: str = "exact",
    search: SearchOptions | None = None,
    hint: SearchHint | None = None,
    remembered: Remembered | None = None,
) -> tuple[Plan, Knowledge | None]:
    """Plans as ``solve`` does; ``exact`` takes a hint and returns what it found out, others neither take nor return.

    What ``remembered`` knows of modules and stages is not worked out again; it is brought up to date.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan needs at least one device")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not a solver; use one of {', '.join(METHODS)}")
    began = time.perf_counter()
    search = search or SearchOptions()
    memo = remembered or Remembered()
    options = memo.begin(graph, cost=cost, device=device, num_devices=num_devices, grid=search.grid)
    machine = memo.machine
    problem = _Problem(
        graph=graph,
        options=options,
        cost=cost,
        machine=machine,
        memo=memo,
        is_held=search.hold_memory and memo.keeps_anything,
    )
    method = _choose(graph, cost) if method == "auto" else method
    in_turn = memo.in_turn(graph.topological_order())
    if problem.is_held:
        in_turn = swap_labels(in_turn, machine) or alone_within_memory(graph, options, machine)
    if method == "sequential":
        found, record, known = in_turn, SearchRecord(method=method, num_evaluations=len(in_turn)), None
    else:
        found, record, known = _search(problem, method, search, hint)
    stages = _finish(problem, found, in_turn, search, widen=method in ("exact", "gahc"))
    plan = Plan(
        device=device,
        num_devices=num_devices,
        stages=stages,
        graph=graph.fingerprint,
        profile=cost.profile_fingerprint,
        sequential_ms=memo.total_ms(in_turn),
        # The search counts whole nanoseconds, a plan does not: its bound may be above the plan in the last digits.
        search=replace(
            record, seconds=time.perf_counter() - began, bound_ms=min(record.bound_ms, _predicted_ms(stages))
        ),
    )
    plan.check_covers(graph)
    return plan, known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    graph: ModuleGraph
    options: Mapping[str, Sequence[DeploymentOption]]
    cost: Cost
    machine: Machine
    memo: Remembered
    is_held: bool = False


_Found = tuple[tuple[StageResult, ...], SearchRecord, Knowledge | None]


def _choose(graph: ModuleGraph, cost: Cost) -> str:
    reason = why_not_exact(graph, cost)
    if reason is None:
        return "exact"
    _log.warning("method='auto' plans with 'gahc', without a bound: %s", reason)
    return "gahc"


def _search(problem: _Problem, method: str, search: SearchOptions, hint: SearchHint | None) -> _Found:
    graph, options, cost, machine = problem.graph, problem.options, problem.cost, problem.machine
    if method == "gahc":
        evaluator = StageEvaluator(options, cost=cost, machine=machine, deterministic_limit=search.deterministic_limit)
        return (*_run_gahc(graph, evaluator, search), None)
    if method == "brute_force":
        enumerate_all = enumerate_held_plans if problem.is_held else enumerate_plans
        every = enumerate_all(graph, options, cost=cost, machine=machine)
        return every.stages, SearchRecord(method=method, num_evaluations=every.num_evaluations), None
    key, answer = problem.memo.ask(graph, (search.objective, problem.is_held))
    if answer is not None and not (hint and hint.forbidden):
        return answer.stages, replace(answer.record, num_evaluations=0), answer.known
    ask = search_within_memory if problem.is_held else search_exactly
    found = ask(graph, options, cost=cost, machine=machine, objective=search.objective, limits=search.limits, hint=hint)
    is_proof = search.objective == "phases"  # the least sum is a bound for the phases too, but no proof
    record = found.record if is_proof else replace(found.record, status="feasible")
    if not (hint and hint.forbidden):
        problem.memo.keep(key, Answer(stages=found.stages, record=record, known=found.known))
    return found.stages, record, found.known


def _finish(
    problem: _Problem,
    found: tuple[StageResult, ...],
    in_turn: tuple[StageResult, ...],
    search: SearchOptions,
    *,
    widen: bool,
) -> tuple[Stage, ...]:
    """Spends spare slots, drops stages that gain nothing, and chooses slots."""
    memo, machine = problem.memo, problem.machine
    if problem.is_held and not fits(found, machine):  # Algorithm 1 knows each stage's memory alone
        found = swap_labels(found, machine) or place_anew(found, machine) or in_turn
    if search.use_spare_slots and widen:
        found = tuple(map(memo.widen, found))
    kept = _keep_gains(found, in_turn, memo)
    if problem.is_held and not fits(kept, machine):  # single modules are on other devices here than there
        kept = swap_labels(kept, machine) or min(found, in_turn, key=memo.total_ms)
    stages = tuple(map(memo.build, kept))
    return memo.stagger(stages) if search.stagger else stages


def _keep_gains(
    stages: tuple[StageResult, ...], sequential: tuple[StageResult, ...], memo: Remembered
) -> tuple[StageResult, ...]:
    """Splits every stage that is predicted no faster than its modules in turn.

    Algorithm 1 judges a merge by the slowest module's forward and backward together; a loop has a slowest
    forward and a slowest backward, which may be two modules.
    """
    alone = {next(iter(stage.choices)): stage for stage in sequential}
    kept: list[StageResult] = []
    for stage in stages:
        apart = [alone[name] for name in stage.choices]
        is_faster = memo.stage_ms(stage) < memo.total_ms(apart)
        kept.extend([stage] if is_faster else apart)
    # Sums in another order may differ in the last bit.
    is_faster = memo.total_ms(kept) < memo.total_ms(sequential)
    return tuple(kept) if is_faster else sequential


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
