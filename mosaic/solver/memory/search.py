"""The exact search under memory that is held across stages (``holding.py``): branch and bound over relaxed plans.

The search in C++ knows memory stage by stage; without the rest its plan is a relaxation, and its bound is a bound.
Where devices can be found so that everything fits (``swap_labels``, ``place_anew``), the relaxed plan is the plan.
Otherwise plans of others are what to beat; its stages made slower may be a plan (``slower.py``); more are looked for at
degrees close to those of the best plan; and the problem is divided, and each part is relaxed and searched again, the
least bound first:

* by a module's degree: the relaxed plan's, and the others, the module that keeps most first; options that no longer
  fit beside what all others keep at the least fall away in each part;
* where every module has one degree left: all placements of the relaxed plan's own stages (``partition.py``), and
  one part for each of its stages in which that set of modules is no stage. Any other partition lacks one of them.

What that does not settle within its nodes is looked at again with more, once nothing else is open.

So what is proven is proven, given effort; where that ends first, the best plan so far and the least bound that is open.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.cost import Cost
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.solver.exact.search import (
    Countdown,
    ExactResult,
    Knowledge,
    Objective,
    SearchHint,
    SearchLimits,
    search_exactly,
)
from mosaic.solver.memory.holding import Stages, assign_alone, fits, place_anew, swap_labels
from mosaic.solver.memory.options import alone_within_memory, fastest_by_degree, on_all_devices, without_hopeless
from mosaic.solver.memory.partition import PartitionSearch, stage_ms
from mosaic.solver.memory.slower import place_slower
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine

Options = Mapping[str, Sequence[DeploymentOption]]

ROOT_SHARE = 0.4
"""Of the effort, for the first relaxation."""
INCUMBENT_SHARE = 0.3
"""Of the effort left after it, for the plans of others to start from."""
CLIMB_SHARE = 0.3
"""Of the effort left, for a better plan before the proof."""
PLACE_NODES = 20_000
"""Places that are tried before a part counts as one that may have a plan."""
PARTITION_NODES = 2_000
"""Places and quotas of one partition, when it is first looked at."""
NODE_EFFORT = 2e-5
"""Of one of these."""
MORE_NODES = 8
"""As many times more, each time that it is looked at again: when nothing else is open."""
HEURISTIC_PARTS = 8
"""Parts that a search without a proof looks at."""
_CLOSE_MS = 1e-6


@dataclass(order=True)
class _Part:
    bound_ms: float
    number: int
    options: Options = field(compare=False)
    forbidden: frozenset[frozenset[str]] = field(compare=False)


@dataclass(order=True)
class _Unsettled:
    """Stages and degrees of which it is not known yet what they take at best."""

    bound_ms: float
    num_nodes: int
    part: _Part = field(compare=False)
    relaxed: ExactResult = field(compare=False)


def search_within_memory(
    graph: ModuleGraph,
    options: Options,
    *,
    cost: Cost,
    machine: Machine,
    objective: Objective = "phases",
    limits: SearchLimits | None = None,
    hint: SearchHint | None = None,
    incumbents: Callable[[SearchLimits], Iterable[Stages]] = lambda limits: (),
) -> ExactResult:
    """Finds the best plan whose devices hold everything, as ``search_exactly`` does without that condition.

    Where the relaxed plan is none, ``incumbents`` is asked for plans that devices hold, to be made within limits.

    Raises:
        ValueError, BackendUnavailableError: As ``search_exactly``.
        InfeasibleError: No plan fits, which is proven.
        UndecidedError: No plan was found, and it is not proven that there is none.
    """
    search = _HeldSearch(
        graph=graph,
        options=without_hopeless(options, machine),
        cost=cost,
        machine=machine,
        objective=objective,
        limits=limits or SearchLimits(),
        hint=hint or SearchHint(),
        incumbents=incumbents,
    )
    return search.run()


@dataclass
class _HeldSearch:
    graph: ModuleGraph
    options: Options
    cost: Cost
    machine: Machine
    objective: Objective
    limits: SearchLimits
    hint: SearchHint
    incumbents: Callable[[SearchLimits], Iterable[Stages]]
    best_ms: float = field(default=float("inf"), init=False)
    best: Stages = field(default=(), init=False)
    num_evaluations: int = field(default=0, init=False)
    known: Knowledge | None = field(default=None, init=False)
    _heap: list[_Part] = field(default_factory=list, init=False)
    _unsettled: list[_Unsettled] = field(default_factory=list, init=False)
    _seen: set[object] = field(default_factory=set, init=False)
    _count: int = field(default=0, init=False)

    def run(self) -> ExactResult:
        options = self.options
        self._countdown = Countdown(self.limits)
        self.known = self.hint.known
        first = self._countdown.part(ROOT_SHARE if self.limits.exact else 1.0)
        relaxed = self._relax(options, frozenset(self._forbidden()), first)
        has_devices = fits(relaxed.stages, self.machine) or swap_labels(relaxed.stages, self.machine) is not None
        if not has_devices and self._countdown.left > 0:
            for stages in self.incumbents(self._countdown.part(INCUMBENT_SHARE)):
                self._offer(stages)
        if not self._take(relaxed.stages):
            self._offer(alone_within_memory(self.graph, options, self.machine))
        bound_ms = relaxed.record.bound_ms
        if bound_ms < self.best_ms - _CLOSE_MS:
            bound_ms = self._divide_all(options, relaxed)
        bound_ms = min(bound_ms, self.best_ms)
        if not self.best:
            raise UndecidedError("no plan was found that keeps to what is forbidden and that the devices hold")
        assert self.known is not None
        return ExactResult(
            stages=self.best,
            cost_ms=self.best_ms,
            record=SearchRecord(
                method="exact",
                num_evaluations=self.num_evaluations,
                status="optimal" if bound_ms >= self.best_ms - _CLOSE_MS else "feasible",
                bound_ms=bound_ms,
            ),
            known=self.known,
        )

    def _divide_all(self, options: Options, relaxed: ExactResult) -> float:
        """Branches until nothing below the best plan is open or the effort is spent; returns the bound."""
        root_ms = relaxed.record.bound_ms
        if self._countdown.left <= 0:
            return root_ms
        self._dive(options, relaxed)
        self._climb(options)
        self._divide(_Part(root_ms, 0, options, frozenset(self._forbidden())), relaxed)
        num_parts = 0
        while self._countdown.left > 0 and (self.limits.exact or num_parts < HEURISTIC_PARTS):
            num_parts += 1
            if self._heap and self._heap[0].bound_ms < self.best_ms - _CLOSE_MS:
                self._look_at(heapq.heappop(self._heap))
            elif self._unsettled and self._unsettled[0].bound_ms < self.best_ms - _CLOSE_MS:
                again = heapq.heappop(self._unsettled)
                self._divide_by_stages(again.part, again.relaxed, MORE_NODES * again.num_nodes)
            else:
                break
        still_open = [*(one.bound_ms for one in self._heap), *(one.bound_ms for one in self._unsettled)]
        return max(root_ms, min([*still_open, self.best_ms]))

    def _look_at(self, part: _Part) -> None:
        try:
            found = self._relax(part.options, part.forbidden, self._countdown.part())
        except InfeasibleError:
            return
        bound_ms = max(part.bound_ms, found.record.bound_ms)
        is_settled = self._take(found.stages) and found.record.status == "optimal"
        if bound_ms < self.best_ms - _CLOSE_MS and not is_settled:
            self._divide(replace(part, bound_ms=bound_ms), found)

    def _dive(self, options: Options, relaxed: ExactResult) -> None:
        """Takes away what holds most, one module's degrees at a time, until a quick plan fits: a plan to start from."""
        for _ in range(sum(len(fastest_by_degree(own)) for own in options.values())):
            chosen = {name: option for stage in relaxed.stages for name, (option, _) in stage.choices.items()}
            lighter = _lighter(options, chosen, self.machine)
            if lighter is None or self._countdown.left <= 0:
                return
            name, degrees = lighter
            own = tuple(option for option in options[name] if option.degree in degrees)
            quick = replace(self._countdown.part(1 / 4), exact=False)
            try:
                options = without_hopeless({**options, name: own}, self.machine)
                relaxed = self._relax(options, frozenset(self._forbidden()), quick)
            except InfeasibleError:
                return
            if self._take(relaxed.stages):
                return

    def _climb(self, options: Options) -> None:
        """Plans at the best plan's degrees, and then with one or two modules at another, while that is better."""
        climb = Countdown(self._countdown.part(CLIMB_SHARE))
        tried: set[frozenset[tuple[str, int]]] = set()
        self._try_degrees(options, self._degrees(), tried)
        is_better = bool(self.best)
        while is_better:
            is_better = False
            now = self._degrees()
            moves = [(name, o.degree) for name, own in options.items() for o in fastest_by_degree(own)]
            moves = [(name, degree) for name, degree in moves if now[name] != degree]
            pairs = [dict(pair) for pair in itertools.combinations(moves, 2) if pair[0][0] != pair[1][0]]
            for changed in (*(dict([move]) for move in moves), *pairs):
                if climb.left <= 0:
                    return
                if self._try_degrees(options, {**now, **changed}, tried):
                    is_better = True
                    break

    def _degrees(self) -> dict[str, int]:
        return {name: option.degree for stage in self.best for name, (option, _) in stage.choices.items()}

    def _try_degrees(
        self, options: Options, degrees: Mapping[str, int], tried: set[frozenset[tuple[str, int]]]
    ) -> bool:
        """Whether the best plan of these degrees is better than the best so far and fits."""
        key = frozenset(degrees.items())
        if key in tried or not degrees:
            return False
        tried.add(key)
        before_ms = self.best_ms
        try:
            these = {name: tuple(o for o in own if o.degree == degrees[name]) for name, own in options.items()}
            chosen = without_hopeless(these, self.machine)
            if self._has_place(chosen):
                found = self._relax(chosen, frozenset(self._forbidden()), self._countdown.part(1 / 4))
                if found.cost_ms < before_ms:
                    self._take(found.stages)
        except InfeasibleError:
            return False
        return self.best_ms < before_ms - _CLOSE_MS

    def _forbidden(self) -> list[frozenset[str]]:
        return [frozenset(names) for names in self.hint.forbidden]

    def _relax(self, options: Options, forbidden: frozenset[frozenset[str]], limits: SearchLimits) -> ExactResult:
        start = self.hint.start if not self.best else [tuple(stage.choices) for stage in self.best]
        found = search_exactly(
            self.graph,
            options,
            cost=self.cost,
            machine=self.machine,
            objective=self.objective,
            limits=limits,
            hint=SearchHint(start=start, forbidden=sorted(map(sorted, forbidden)), known=self.known),
        )
        self.num_evaluations += found.record.num_evaluations
        self.known = found.known
        return found

    def _take(self, stages: Stages) -> bool:
        """Offers a relaxed plan on devices that hold it; returns whether there are such, at no more time."""
        same_times = stages if fits(stages, self.machine) else swap_labels(stages, self.machine)
        if same_times is None and self.cost.interference.is_zero:
            same_times = place_anew(stages, self.machine, ends=self._countdown.ends)
        if same_times is not None:
            self._offer(same_times)
            return True
        elsewhere = (
            None if self.cost.interference.is_zero else place_anew(stages, self.machine, ends=self._countdown.ends)
        )
        if elsewhere is None and self._total_ms(stages) < self.best_ms:
            elsewhere = place_slower(stages, self.options, self.machine, ends=self._countdown.ends)
        if elsewhere is not None:
            self._offer(elsewhere)
        return False

    def _total_ms(self, stages: Stages) -> float:
        return sum(stage_ms(stage, self.cost, self.objective == "sum") for stage in stages)

    def _offer(self, stages: Stages) -> None:
        total_ms = self._total_ms(stages)
        allowed = not any(frozenset(stage.choices) in self._forbidden() for stage in stages)
        if total_ms < self.best_ms and allowed:
            self.best_ms, self.best = total_ms, stages

    def _divide(self, part: _Part, relaxed: ExactResult) -> None:
        chosen = {name: option for stage in relaxed.stages for name, (option, _) in stage.choices.items()}
        found = _largest_open(part.options, chosen)
        if found is None:
            self._divide_by_stages(part, relaxed)
            return
        name, degree = found
        for is_same in (True, False):
            own = tuple(o for o in part.options[name] if (o.degree == degree) == is_same)
            try:
                options = without_hopeless({**part.options, name: own}, self.machine)
            except InfeasibleError:
                continue
            if self._has_place(options):
                self._push(part.bound_ms, options, part.forbidden)

    def _has_place(self, options: Options) -> bool:
        """False only where devices cannot hold the modules, whatever the stages."""
        lightest = {name: sorted(fastest_by_degree(own), key=on_all_devices) for name, own in options.items()}
        chosen, is_complete = assign_alone(lightest, self.machine, max_nodes=PLACE_NODES)
        return chosen is not None or not is_complete

    def _divide_by_stages(self, part: _Part, relaxed: ExactResult, num_nodes: int = PARTITION_NODES) -> None:
        search = PartitionSearch(
            options=part.options,
            cost=self.cost,
            machine=self.machine,
            by_sum=self.objective == "sum",
            cost_ms=self.best_ms,
            nodes_left=num_nodes,
            ends=self._countdown.ends,
        )
        by_sum = self.objective == "sum"
        partition = [tuple(stage.choices) for stage in relaxed.stages]
        exact = relaxed.record.status == "optimal"
        least = [stage_ms(stage, self.cost, by_sum) if exact else 0.0 for stage in relaxed.stages]
        search.run(partition, least)
        self._countdown.spend(NODE_EFFORT * (num_nodes - search.nodes_left))
        if search.stages is not None:
            self._offer(search.stages)
        if not search.is_complete:
            heapq.heappush(self._unsettled, _Unsettled(part.bound_ms, num_nodes, part, relaxed))
        if num_nodes > PARTITION_NODES:
            return  # the other parts are there since the first time
        for names in partition:
            self._push(part.bound_ms, part.options, part.forbidden | {frozenset(names)})

    def _push(self, bound_ms: float, options: Options, forbidden: frozenset[frozenset[str]]) -> None:
        key = (tuple((name, tuple(sorted({o.degree for o in own}))) for name, own in options.items()), forbidden)
        if key not in self._seen:
            self._seen.add(key)
            self._count += 1
            heapq.heappush(self._heap, _Part(bound_ms, self._count, options, forbidden))


def _lighter(
    options: Options, chosen: Mapping[str, DeploymentOption], machine: Machine
) -> tuple[str, frozenset[int]] | None:
    """The module that can be made lighter by most, and the degrees at which it is; None where none can.

    Lighter on all devices together where these are too few for what is chosen; otherwise on one device.
    """
    is_over = sum(map(on_all_devices, chosen.values())) > machine.num_devices * machine.memory_bytes
    for measure in (on_all_devices, _on_one) if is_over else (_on_one, on_all_devices):
        found = [(name, [o for o in options[name] if measure(o) < measure(own)]) for name, own in chosen.items()]
        less = [(name, lower) for name, lower in found if lower]
        if less:
            name, lower = max(less, key=lambda one: measure(chosen[one[0]]) - min(map(measure, one[1])))
            return name, frozenset(option.degree for option in lower)
    return None


def _largest_open(options: Options, chosen: Mapping[str, DeploymentOption]) -> tuple[str, int] | None:
    """The module that keeps most of those with a choice of degrees, and the degree that is chosen."""
    open_names = [name for name, own in chosen.items() if any(o.degree != own.degree for o in options[name])]
    name = max(open_names, key=lambda one: on_all_devices(chosen[one]), default=None)
    return None if name is None else (name, chosen[name].degree)


def _on_one(option: DeploymentOption) -> int:
    return option.kept_bytes
