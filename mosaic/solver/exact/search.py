"""The exact search: ``mosaic._search`` asked with the options of a graph, and its answer as stages.

Best-first over the sets of finished modules, with a special-purpose search for each stage (csrc/search). It minimises
what a plan predicts: the slowest forward plus the slowest backward of each stage, with interference.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mosaic.cost import Cost, Eq8Interference
from mosaic.errors import BackendUnavailableError, InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.profile import Phase
from mosaic.search_extension import load_search
from mosaic.solver.exact.pair_table import pair_shares, pair_table
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.stage import Machine, StageResult

if TYPE_CHECKING:
    from mosaic import _search

Objective = Literal["phases", "sum"]
MAX_MODULES = 64
_MAX_SEED = 2**63 - 1  # what the extension's whole numbers hold
Options = Mapping[str, Sequence[DeploymentOption]]
_ROW = operator.attrgetter("degree", "quota", "forward_ns", "backward_ns", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What ends a search that is not finished; the best plan so far is then returned with a true lower bound."""

    effort: float = 10.0
    """Work: what the search looks at, counted in about seconds of a core, so the same on any machine under any load.
    0 gives the sequential plan at once."""
    seconds: float = math.inf
    """Wall clock, for the extraordinary: what it ends depends on the machine."""
    seed: int = 0
    """Seed of what is drawn at random: the windows of a plan that are planned anew."""
    exact: bool = True
    """Whether to prove the plan best; otherwise a good plan is returned soon."""
    should_stop: Callable[[], bool] | None = None
    """Asked several times a second; once it says so, the search ends as at the end of its effort."""

    def __post_init__(self) -> None:
        if not (self.effort >= 0 and self.seconds >= 0 and 0 <= self.seed <= _MAX_SEED):
            raise ValueError(
                f"effort={self.effort}, seconds={self.seconds}, seed={self.seed}; use values of 0 or more, and at most "
                f"seed {_MAX_SEED}"
            )

    @property
    def is_stopped(self) -> bool:
        """Whether somebody wants the best plan so far now."""
        return self.should_stop is not None and self.should_stop()


class Countdown:
    """What is left of limits, from when it is made on the thread that searches.

    Attributes:
        ends: When the time is over, on ``time.perf_counter``'s clock.
    """

    def __init__(self, limits: SearchLimits) -> None:
        self.ends = time.perf_counter() + limits.seconds
        self._limits = limits
        self._apart = 0.0
        self._before = self.spend(0.0)

    def spend(self, effort: float) -> float:
        """Counts work outside of the extension, which counts its own; returns all that this thread has spent."""
        try:
            spent: float = load_search().spend(effort)
        except BackendUnavailableError:  # Algorithm 1 needs none
            spent = self._apart = self._apart + effort
        return spent

    @property
    def spent(self) -> float:
        """Effort so far."""
        return self.spend(0.0) - self._before

    @property
    def left(self) -> float:
        """Effort, and no more than there are seconds; 0 once the search is to end."""
        if self._limits.is_stopped:
            return 0.0
        return max(0.0, min(self.ends - time.perf_counter(), self._limits.effort - self.spent))

    def part(self, share: float = 1.0) -> SearchLimits:
        """Returns limits of a part of what is left."""
        return replace(self._limits, effort=share * self.left, seconds=max(0.0, self.ends - time.perf_counter()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What a search found out about sets of modules; of use to one of a graph that has modules in common with it."""

    names: tuple[str, ...]
    """Modules, in the order of their bits."""
    values: _search.Known
    """By bitmask, with the options that they hold for."""
    rows: Mapping[str, tuple[Sequence[DeploymentOption], _search.Module]]
    """Modules as the extension has them, each with the options that it was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHint:
    """What a search is told beforehand; nothing of it changes what is proven."""

    start: Sequence[Collection[str]] = ()
    """Stages to start from, in place of the heuristic's own; empty: none."""
    forbidden: Sequence[Collection[str]] = ()
    """Sets of modules that must not be stages."""
    known: Knowledge | None = None
    """Of an earlier search. What has changed since (a module's options, the machine) is found and not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best plan found, and how good it surely is."""

    stages: tuple[StageResult, ...]
    """In an order that keeps the dependencies."""
    cost_ms: float
    """What they are predicted to take, in milliseconds."""
    record: SearchRecord
    """Whether they are proven best, the bound, and how much was searched."""
    known: Knowledge
    """For later searches."""


def search_exactly(
    graph: ModuleGraph,
    options: Options,
    *,
    cost: Cost,
    machine: Machine,
    objective: Objective = "phases",
    limits: SearchLimits | None = None,
    hint: SearchHint | None = None,
) -> ExactResult:
    """Finds the plan with the least predicted time, and proves it where ``limits`` allow.

    Args:
        graph: What depends on what.
        options: Deployment options of every module; not empty.
        cost: Asked for interference only.
        machine: Devices to place on.
        objective: ``phases`` adds up each stage's slowest forward and slowest backward; ``sum`` takes its slowest
            module, forward and backward together, as the paper's Eq. 4 does.
        limits: When to stop.
        hint: Where to start, what to leave out, what is known already.

    Raises:
        ValueError: More than 64 modules, an interference that this search does not know, or a start that is no
            partition in an order that keeps the dependencies.
        InfeasibleError: What is forbidden leaves no plan.
        BackendUnavailableError: The extension is not built.
    """
    search = load_search()
    limits = limits or SearchLimits()
    hint = hint or SearchHint()
    names = graph.topological_order()
    place = {name: index for index, name in enumerate(names)}
    earlier = {name: index for index, name in enumerate(hint.known.names)} if hint.known else {}
    rows = _rows(search, names, options, cost, hint.known.rows if hint.known else {})
    found: _search.Plan = search.plan(
        _problem(search, graph, names, options, rows, cost=cost, machine=machine, objective=objective),
        effort=limits.effort,
        seconds=limits.seconds,
        seed=limits.seed,
        exact=limits.exact,
        start=_masks(hint.start, place),
        forbidden=_masks(hint.forbidden, place),
        known=hint.known.values if hint.known else None,
        places=[earlier.get(name, -1) for name in names] if hint.known else (),
        should_stop=limits.should_stop,
    )
    if not found.stages:
        sets = "; ".join(", ".join(sorted(members)) for members in hint.forbidden)
        raise InfeasibleError("what is forbidden leaves no plan", reasons=[f"no stage may be one of: {sets}"])
    return ExactResult(
        stages=tuple(_stage(stage, names, options) for stage in found.stages),
        cost_ms=found.cost_ns / NS_PER_MS,
        record=SearchRecord(
            method="exact",
            num_evaluations=found.num_evaluations,
            status="optimal" if found.status == "optimal" else "feasible",
            bound_ms=found.bound_ns / NS_PER_MS,
        ),
        known=Knowledge(names=names, values=found.known, rows={} if _is_drawn(cost) else rows),
    )


def _masks(sets: Sequence[Collection[str]], place: Mapping[str, int]) -> list[int]:
    return [sum([1 << place[name] for name in members]) for members in sets]


def why_not_exact(graph: ModuleGraph, cost: Cost) -> str | None:
    """Returns why the exact search cannot plan a graph with these costs; None if it can."""
    if len(graph.modules) > MAX_MODULES:
        return f"{len(graph.modules)} modules are more than the {MAX_MODULES} that the exact search holds"
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
    if form.is_pairwise:
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


_Rows = Mapping[str, tuple[Sequence[DeploymentOption], Any]]


def _is_drawn(cost: Cost) -> bool:
    return isinstance(cost.interference, Eq8Interference)


def _rows(search: Any, names: Sequence[str], options: Options, cost: Cost, known: _Rows) -> _Rows:
    """Modules of the extension, without what comes before them; known ones where their options are the same object."""
    if _is_drawn(cost):  # what is drawn is no part of the options
        drawn = {name: [_drawing_option(search, cost, name, option) for option in options[name]] for name in names}
        return {name: (options[name], search.Module(drawn[name], ())) for name in names}
    return {
        name: old
        if (old := known.get(name)) is not None and old[0] is options[name]
        else (options[name], search.Module.of([_ROW(option) for option in options[name]], ()))
        for name in names
    }


def _problem(
    search: Any,
    graph: ModuleGraph,
    names: Sequence[str],
    options: Options,
    rows: _Rows,
    *,
    cost: Cost,
    machine: Machine,
    objective: Objective,
) -> _search.Problem:
    place = {name: index for index, name in enumerate(names)}
    before: list[list[int]] = [[] for _ in names]
    for edge in graph.edges:
        before[place[edge.target]].append(place[edge.source])
    problem: _search.Problem = search.Problem(
        [rows[name][1].after(others) for name, others in zip(names, before, strict=True)],
        num_devices=machine.num_devices,
        num_slots=machine.num_slots,
        memory_bytes=machine.memory_bytes,
        objective=objective,
    )
    if not cost.interference.is_zero:
        _disturb(problem, graph, names, options, cost, machine)
    return problem


def _disturb(
    problem: _search.Problem,
    graph: ModuleGraph,
    names: Sequence[str],
    options: Options,
    cost: Cost,
    machine: Machine,
) -> None:
    reason = _why_not_searched(graph, cost)
    if reason is not None:
        raise ValueError(f"{reason}; use method='gahc', or interference='pairwise' or 'eq8'")
    form = cost.interference
    if isinstance(form, Eq8Interference):
        found = [form.coefficients.get(phase) for phase in Phase]
        forward, backward = (
            (e.e1 * NS_PER_MS, e.e2 * NS_PER_MS, e.e3 * NS_PER_MS) if e is not None else (0.0, 0.0, 0.0) for e in found
        )
        problem.disturb_by_bandwidth(forward, backward)
    else:
        shares = pair_shares(names, options, form)
        if shares is not None:
            problem.disturb_by_shares(*shares)
        else:
            problem.disturb_by_pairs(*(pair_table(names, options, cost, machine, phase) for phase in Phase))


def _drawing_option(search: Any, cost: Cost, name: str, option: DeploymentOption) -> Any:
    """Returns an option with what the forms over bandwidth need to know of it."""
    form = cost.interference
    assert isinstance(form, Eq8Interference)
    forward, backward = (_share(form, name, phase, option.quota) for phase in Phase)
    return search.Option(
        degree=option.degree,
        quota=option.quota,
        forward_ns=option.forward_ns,
        backward_ns=option.backward_ns,
        memory_bytes=option.memory_bytes,
        forward_bandwidth=forward,
        backward_bandwidth=backward,
    )


def _share(form: Eq8Interference, name: str, phase: Phase, quota: int) -> float:
    return form.share(name, phase, quota) if phase in form.coefficients else 0.0


def _stage(stage: _search.Stage, names: Sequence[str], options: Options) -> StageResult:
    rows = sorted(stage.rows)  # by module
    return StageResult(
        latency_ns=stage.latency_ns,
        choices={names[m]: (options[names[m]][option], devices) for m, option, devices, _ in rows},
        starts={names[m]: starts for m, _, _, starts in rows},
    )
