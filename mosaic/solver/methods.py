"""The table of planning methods, and Mosaic's own methods.

To add a method, write a function from a ``Task`` to an ``Answer`` and add it to the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mosaic.errors import unknown
from mosaic.plan import SearchRecord, TemporalStage
from mosaic.solver.exact import search_exactly, why_not_exact
from mosaic.solver.gahc.clustering import cluster
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.held_memory import fits, place_stages, search_within_memory
from mosaic.solver.limits import Countdown
from mosaic.solver.planners import distmm, megatron, spindle
from mosaic.solver.predict import build_stages, spend_spare_slots
from mosaic.solver.stage import StageResult
from mosaic.solver.task import Answer, Task

_log = logging.getLogger(__name__)

Stages = tuple[StageResult, ...]


def plan_automatically(task: Task) -> Answer:
    """Plans with the exact search if it can plan the problem, otherwise with Algorithm 1 and a warning."""
    reason = why_not_exact(task.graph)
    if reason is None:
        return plan_exactly(task)
    _log.warning("method='auto' plans with 'gahc', without a bound: %s", reason)
    return plan_by_clustering(task)


def plan_exactly(task: Task) -> Answer:
    """Plans with the exact search, and with a branch and bound over it if memory is held across stages."""
    search = task.search
    find = partial(search_within_memory, starts=[task.in_turn]) if task.is_held else search_exactly
    result = find(
        task.graph,
        task.options,
        cost=task.cost,
        machine=task.machine,
        limits=search.limits,
        forbidden=task.forbidden,
    )
    return Answer(stages=_finish(task, result.stages), record=result.record)


def plan_by_clustering(task: Task) -> Answer:
    """Plans with the paper's Algorithm 1; if its effort is spent, with the stages merged so far."""
    countdown = Countdown(task.search.limits)
    evaluator = StageEvaluator(task.options, cost=task.cost, machine=task.machine, countdown=countdown)
    stages = cluster(task.graph, evaluator)
    if countdown.left <= 0:
        _log.warning(
            "Algorithm 1 reached its limit (effort %g); a higher one may give a better plan", task.search.limits.effort
        )
    if evaluator.num_unresolved:
        _log.warning("CP-SAT reached its limit on %d placements; there may be a better plan", evaluator.num_unresolved)
    return Answer(stages=_finish(task, stages), record=SearchRecord(method="gahc"))


def plan_in_turn(task: Task) -> Answer:
    """Plans modules one after the other, each at its own best degree and quota."""
    stages = tuple(build_stages([stage], task.times, task.machine)[0] for stage in task.in_turn)  # all from slot 0 on
    return Answer(stages=stages, record=SearchRecord(method="sequential"))


def _finish(task: Task, stages: Stages) -> tuple[TemporalStage, ...]:
    """Repairs memory, assigns idle slots, splits stages without gain and chooses slots."""
    machine = task.machine
    if task.is_held and not fits(stages, machine):  # Algorithm 1 checks the memory of single stages only
        stages = place_stages(stages, machine) or task.in_turn
    if task.search.use_spare_slots:
        stages = tuple(spend_spare_slots(stage, task.options, times=task.times, machine=machine) for stage in stages)
    best = _split_useless(task, stages)
    if task.is_held and not fits(best, machine):  # in turn, modules use other devices than in their stage
        best = place_stages(best, machine) or min(stages, task.in_turn, key=task.times.total_ms)
    return build_stages(best, task.times, machine)


def _split_useless(task: Task, stages: Stages) -> Stages:
    """Splits every stage that is not predicted faster than its modules one after the other.

    Algorithm 1 compares forward plus backward of the slowest module. A loop waits for the slowest forward and the
    slowest backward, which may be those of two modules.
    """
    times = task.times
    alone = {next(iter(stage.choices)): stage for stage in task.in_turn}
    useful: list[StageResult] = []
    for stage in stages:
        apart: Sequence[StageResult] = [alone[name] for name in stage.choices]
        is_faster = times.stage_ms(stage.choices) < times.total_ms(apart)
        useful.extend([stage] if is_faster else apart)
    return tuple(useful) if times.total_ms(useful) < times.total_ms(task.in_turn) else task.in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A planning method; its plan can run, unless it slices modules."""

    name: str
    description: str
    plan: Callable[[Task], Answer]
    gives_bound: bool = False
    """True if its record has a bound."""
    can_be_stopped: bool = False
    """True if it has a plan whenever it is interrupted."""
    is_compared: bool = True
    """True if ``mosaic plan --compare`` includes it by default."""


_ALL = (
    Method(
        name="auto",
        description="exact if it can plan the problem, otherwise gahc; over a network the best simulated plan",
        plan=plan_automatically,
        gives_bound=True,
        can_be_stopped=True,
        is_compared=False,
    ),
    Method(name="sequential", description="modules in turn, each at its own best degree and quota", plan=plan_in_turn),
    Method(
        name="data-parallel",
        description="modules in turn, each on all devices",
        plan=megatron.plan_on_all,
        is_compared=False,
    ),
    Method(
        name="megatron",
        description="modules in turn, all at the best common data-parallel degree",
        plan=megatron.plan,
    ),
    Method(
        name="distmm",
        description="parallel modules on disjoint whole devices, solved by exact; a reconstruction",
        plan=distmm.plan,
    ),
    Method(name="spindle", description="slices of modules in waves", plan=spindle.plan),
    Method(name="gahc", description="the paper's Algorithm 1", plan=plan_by_clustering, can_be_stopped=True),
    Method(
        name="exact",
        description="a plan that is proven optimal, or has a bound",
        plan=plan_exactly,
        gives_bound=True,
        can_be_stopped=True,
    ),
)

METHODS = {method.name: method for method in _ALL}


def compared_methods() -> tuple[str, ...]:
    """Returns the names of the methods compared by default."""
    return tuple(method.name for method in METHODS.values() if method.is_compared)


def describe_methods() -> str:
    """Returns all methods on one line, each with its description."""
    return "; ".join(f"{method.name} ({method.description})" for method in METHODS.values())


def method_of(name: str) -> Method:
    """Returns a method by name; raises ValueError with all names."""
    if name not in METHODS:
        raise ValueError(unknown("method", name, METHODS))
    return METHODS[name]
