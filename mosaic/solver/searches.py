"""Mosaic's own methods: each finds stages, which are then widened, held against their modules in turn, and placed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.plan import SearchRecord, Stage
from mosaic.solver.exact.brute_force import enumerate_held_plans, enumerate_plans
from mosaic.solver.exact.search import Countdown, SearchLimits, search_exactly, why_not_exact
from mosaic.solver.gahc.clustering import cluster
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.memory.holding import fits, place_anew, swap_labels
from mosaic.solver.memory.search import search_within_memory
from mosaic.solver.planners import distmm, optimus
from mosaic.solver.planners.waves import plan_waves
from mosaic.solver.replan.remembered import ProvenStages, Remembered
from mosaic.solver.stage import StageResult
from mosaic.solver.task import Found, Task

_log = logging.getLogger(__name__)


def find_automatically(task: Task) -> Found:
    """Plans exactly where that can search this problem, otherwise with Algorithm 1 and a warning that says why."""
    reason = why_not_exact(task.graph, task.cost)
    if reason is None:
        return find_exactly(task)
    _log.warning("method='auto' plans with 'gahc', without a bound: %s", reason)
    return find_by_clustering(task)


def find_exactly(task: Task) -> Found:
    """Plans with the exact search; a problem that was proven before is answered from memory."""
    search, hint = task.search, task.hint
    key, answer = task.memo.ask(task.graph, (search.objective, task.is_held))
    if answer is not None and not (hint and hint.forbidden):
        record = replace(answer.record, num_evaluations=0)
        return Found(stages=_finished(task, answer.stages, widen=True), record=record, known=answer.known)
    within_memory = partial(search_within_memory, incumbents=partial(_whole_device_plans, task))
    ask = within_memory if task.is_held else search_exactly
    found = ask(
        task.graph,
        task.options,
        cost=task.cost,
        machine=task.machine,
        objective=search.objective,
        limits=search.limits,
        hint=hint,
    )
    is_proof = search.objective == "phases"  # the least sum is a bound for the phases too, but no proof
    record = found.record if is_proof else replace(found.record, status="feasible")
    if not (hint and hint.forbidden):
        task.memo.keep(key, ProvenStages(stages=found.stages, record=record, known=found.known))
    return Found(stages=_finished(task, found.stages, widen=True), record=record, known=found.known)


def _whole_device_plans(task: Task, limits: SearchLimits) -> Iterator[tuple[StageResult, ...]]:
    """Plans with planners of whole devices, whose few options are soon searched."""
    quick = replace(task, search=replace(task.search, limits=limits))
    for find in (partial(plan_waves, draw=optimus.draw), distmm.find):  # the first searches nothing
        with suppress(InfeasibleError, UndecidedError):
            stages = tuple(_result(stage, task) for stage in find(quick).stages)
            if fits(stages, task.machine):
                yield stages


def _result(stage: Stage, task: Task) -> StageResult:
    """A stage of whole devices as the searches have it."""
    choices, starts = {}, {}
    for placed in stage.placements:
        own = task.options[placed.module]
        option = next(o for o in own if (o.degree, o.quota) == (placed.degree, placed.quota))
        choices[placed.module] = option, placed.devices
        starts[placed.module] = (placed.slots[0],) * placed.degree
    latency_ns = max(option.latency_ns for option, _ in choices.values())
    return StageResult(latency_ns=latency_ns, choices=choices, starts=starts)


def find_by_clustering(task: Task) -> Found:
    """Plans with the paper's Algorithm 1; when time is over, what has been merged so far is the plan."""
    search = task.search
    countdown = Countdown(search.limits)
    evaluator = StageEvaluator(
        task.options,
        cost=task.cost,
        machine=task.machine,
        deterministic_limit=search.deterministic_limit,
        left=lambda: countdown.left,
        spend=countdown.spend,
    )
    result = cluster(task.graph, evaluator, prune=search.prune, cache=search.cache, left=lambda: countdown.left)
    if countdown.left <= 0:
        _log.warning(
            "Algorithm 1 was ended by its limits (effort %g); with more it may merge more", search.limits.effort
        )
    if evaluator.num_unresolved:
        _log.warning(
            "CP-SAT gave up %d questions at deterministic_limit=%g; a higher limit may find a better plan",
            evaluator.num_unresolved,
            search.deterministic_limit,
        )
    record = SearchRecord(
        method="gahc",
        num_evaluations=result.num_evaluations,
        num_cache_hits=result.num_cache_hits,
        num_pruned=result.num_pruned,
        num_sat_calls=evaluator.num_sat_calls,
    )
    return Found(stages=_finished(task, result.stages, widen=True), record=record)


def find_in_turn(task: Task) -> Found:
    """Plans every module in turn, each at its own best degree and quota."""
    record = SearchRecord(method="sequential", num_evaluations=len(task.in_turn))
    return Found(stages=_finished(task, task.in_turn, widen=False), record=record)


def find_by_brute_force(task: Task) -> Found:
    """Tries everything; at most six modules on two devices."""
    enumerate_all = enumerate_held_plans if task.is_held else enumerate_plans
    every = enumerate_all(task.graph, task.options, cost=task.cost, machine=task.machine)
    stages = _finished(task, every.stages, widen=False)
    record = SearchRecord(
        method="brute_force",
        num_evaluations=every.num_evaluations,
        status="optimal",
        bound_ms=sum(stage.forward_ms + stage.backward_ms for stage in stages),
    )
    return Found(stages=stages, record=record)


def _finished(task: Task, found: tuple[StageResult, ...], *, widen: bool) -> tuple[Stage, ...]:
    """Spends spare slots, drops stages that gain nothing, and chooses slots."""
    memo, machine = task.memo, task.machine
    if task.is_held and not fits(found, machine):  # Algorithm 1 knows each stage's memory alone
        found = swap_labels(found, machine) or place_anew(found, machine) or task.in_turn
    if task.search.use_spare_slots and widen:
        found = tuple(map(memo.widen, found))
    kept = _keep_gains(found, task.in_turn, memo)
    if task.is_held and not fits(kept, machine):  # single modules are on other devices here than there
        kept = swap_labels(kept, machine) or min(found, task.in_turn, key=memo.total_ms)
    stages = tuple(map(memo.build, kept))
    return memo.stagger(stages) if task.search.stagger else stages


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
        apart: Sequence[StageResult] = [alone[name] for name in stage.choices]
        is_faster = memo.stage_ms(stage) < memo.total_ms(apart)
        kept.extend([stage] if is_faster else apart)
    # Sums in another order may differ in the last bit.
    is_faster = memo.total_ms(kept) < memo.total_ms(sequential)
    return tuple(kept) if is_faster else sequential
