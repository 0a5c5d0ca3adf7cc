"""Chooses activation policies of all layers within each rank's memory, for a short step.

As a score (PipeWeaver, section 6.3): simulate the fastest policies. If memory does not hold, weight each forward with
its backward by its slack, choose for each rank the least weighted added time within its memory, and simulate again.
Repeat a few times, and return the best that holds. The weights are ours, because added times do not add up to a step.

A rank's choice is greedy: at the instant that misses most memory, the candidate that adds least time for the bytes that
it frees is taken, until all instants fit. Then faster candidates are taken where room is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mosaic.pipelining.layers import Layer
from mosaic.pipelining.task_graph import workspace_bytes
from mosaic.pipelining.tasks import ActionKind, Orders, PairKey, TaskGraph, Timed, memory_peaks, simulate

Choice = tuple[int, ...]
"""Candidate index of each pair."""
Floats = npt.NDArray[np.float64]

MAX_CANDIDATES = 8
"""Most candidates of a chunk: the fastest, the leanest, and others evenly between them by bytes."""
ROUNDS = 8
"""Most simulated choices."""
_GB = 1e9
_TAKEN_AT_ONCE = 4
"""Candidates that a greedy choice takes by one price list. Without a limit steps got up to 2 % longer."""
_MIN_WEIGHT = 0.02
"""Weight of a pair with large slack."""
_KEPT_WEIGHT = 0.5
"""Share of a weight that stays from one simulation to the next."""
_SCALE = 0.3
"""Slack at which a weight falls to 1/e, as a share of a task's mean time. With these three the added time of a step was
62 to 96 % less than with equal weights (1F1B of 4 and 8 ranks with 8 and 16 ragged microbatches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy for each layer of a chunk, with their costs."""

    strategies: tuple[int, ...]
    """Policy index of each layer."""
    forward_ns: int
    backward_ns: int
    kept_bytes: int
    """Bytes from the start of forward to the end of backward."""
    workspace_bytes: int
    """Further bytes while forward or backward runs: layers' workspace, and activations that are not kept."""

    @property
    def added_ns(self) -> int:
        return self.forward_ns + self.backward_ns


_NOTHING = Candidate(strategies=(), forward_ns=0, backward_ns=0, kept_bytes=0, workspace_bytes=0)


def candidates_of(layers: Sequence[Layer], count: int = MAX_CANDIDATES) -> tuple[Candidate, ...]:
    """Returns up to ``count`` candidates of a chunk with one piece, from the fastest to the leanest.

    Changes of single layers are made in the order of added time over freed bytes.
    """
    hulls = [_hull(layer) for layer in layers]
    changes = [
        (_price(layer, before, after), place, rank, after)
        for place, (layer, hull) in enumerate(zip(layers, hulls, strict=True))
        for rank, (before, after) in enumerate(pairwise(hull))
    ]
    policies = [hull[0] for hull in hulls]
    candidates = [_candidate(layers, policies)]
    for _, place, _, after in sorted(changes):
        policies[place] = after
        candidates.append(_candidate(layers, policies))
    if len(candidates) <= count:
        return tuple(candidates)
    sizes = np.array([candidate.kept_bytes for candidate in candidates])
    goals = np.linspace(sizes[0], sizes[-1], count)
    places = sorted({0, len(candidates) - 1, *(int(np.abs(sizes - goal).argmin()) for goal in goals[1:-1])})
    return tuple(candidates[at] for at in places)


def _candidate(layers: Sequence[Layer], policies: Sequence[int]) -> Candidate:
    strategies = [layer.strategies[at] for layer, at in zip(layers, policies, strict=True)]
    memory = [
        (strategy.kept_bytes, layer.strategies[0].kept_bytes, layer.workspace_bytes + strategy.workspace_bytes)
        for layer, strategy in zip(layers, strategies, strict=True)
    ]
    return Candidate(
        strategies=tuple(policies),
        forward_ns=sum(round(strategy.extra_forward_ms * 1e6) for strategy in strategies),
        backward_ns=sum(round(strategy.extra_backward_ms * 1e6) for strategy in strategies),
        kept_bytes=sum(strategy.kept_bytes for strategy in strategies),
        workspace_bytes=workspace_bytes(memory),
    )


def _added_ms(layer: Layer, at: int) -> float:
    return layer.strategies[at].extra_forward_ms + layer.strategies[at].extra_backward_ms


def _price(layer: Layer, before: int, after: int) -> float:
    """Returns the added time over the freed bytes of a change of policy."""
    freed = layer.strategies[before].kept_bytes - layer.strategies[after].kept_bytes
    return (_added_ms(layer, after) - _added_ms(layer, before)) / freed


def _hull(layer: Layer) -> list[int]:
    """Returns the policies of a layer from the fastest to the leanest whose added time over freed bytes only grows."""
    kept_bytes = [strategy.kept_bytes for strategy in layer.strategies]
    hull: list[int] = []
    for at in sorted(range(len(kept_bytes)), key=lambda at: (_added_ms(layer, at), kept_bytes[at], at)):
        if hull and kept_bytes[at] >= kept_bytes[hull[-1]]:
            continue
        while len(hull) > 1 and _price(layer, hull[-2], hull[-1]) >= _price(layer, hull[-1], at):
            hull.pop()
        hull.append(at)
    return hull


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A forward with its backward, between which activations are in use."""

    forward: int
    backward: int
    """Index of a task on the same rank."""
    candidates: tuple[Candidate, ...]
    counted: Candidate = _NOTHING
    """Candidate that the graph's times and bytes include; by default none."""

    @property
    def fastest(self) -> int:
        return min(range(len(self.candidates)), key=lambda at: self.candidates[at].added_ns)

    @property
    def leanest(self) -> int:
        """Index of the candidate that keeps least; of equals the fastest."""
        options = self.candidates
        return min(range(len(options)), key=lambda at: (options[at].kept_bytes, options[at].added_ns))


def pairs_of(graph: TaskGraph) -> tuple[Pair, ...]:
    """Returns all forwards with their backwards of a graph in which everything is kept; equal chunks are read once.

    Bytes that a forward takes and does not free are kept; those that it frees are workspace.
    """
    phases: dict[PairKey, dict[ActionKind, int]] = {}
    for index, task in enumerate(graph.tasks):
        phases.setdefault((task.chunk, task.microbatch, task.piece), {})[task.kind] = index
    candidates = {layers: candidates_of(layers) for layers in dict.fromkeys(graph.layers.values())}
    pairs = []
    for key, layers in graph.layers.items():
        forward = graph.tasks[phases[key][ActionKind.FORWARD]]
        kept_bytes = forward.takes_bytes - forward.frees_bytes
        pairs.append(
            Pair(
                forward=phases[key][ActionKind.FORWARD],
                backward=phases[key][ActionKind.BACKWARD],
                candidates=candidates[layers],
                counted=replace(_NOTHING, kept_bytes=kept_bytes, workspace_bytes=forward.frees_bytes),
            )
        )
    return tuple(pairs)


def strategies_of(graph: TaskGraph, pairs: Sequence[Pair], choice: Sequence[int]) -> dict[PairKey, tuple[int, ...]]:
    tasks = (graph.tasks[pair.forward] for pair in pairs)
    return {
        (task.chunk, task.microbatch, task.piece): pair.candidates[candidate].strategies
        for task, pair, candidate in zip(tasks, pairs, choice, strict=True)
    }


def with_candidates(graph: TaskGraph, pairs: Sequence[Pair], choice: Sequence[int]) -> TaskGraph:
    """Returns the graph with the times and bytes of one candidate for each pair."""
    tasks = list(graph.tasks)
    for pair, index in zip(pairs, choice, strict=True):
        new, old = pair.candidates[index], pair.counted
        held, works = new.kept_bytes - old.kept_bytes, new.workspace_bytes - old.workspace_bytes
        forward, backward = tasks[pair.forward], tasks[pair.backward]
        tasks[pair.forward] = replace(
            forward,
            time_ns=forward.time_ns + new.forward_ns - old.forward_ns,
            takes_bytes=forward.takes_bytes + held + works,
            frees_bytes=forward.frees_bytes + works,
        )
        tasks[pair.backward] = replace(
            backward,
            time_ns=backward.time_ns + new.backward_ns - old.backward_ns,
            takes_bytes=backward.takes_bytes + works,
            frees_bytes=backward.frees_bytes + held + works,
        )
    return replace(graph, tasks=tuple(tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A choice that fits on every rank at all times."""

    choice: Choice
    graph: TaskGraph
    """The graph with the chosen times and bytes, and the limits."""
    timed: Timed
    bound_ns: int
    """Lower bound of all choices in this order: the step with everything kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShortage:
    """Bytes that the leanest policies lack, on the rank that lacks most; ``str`` has the remedies."""

    graph: TaskGraph = field(repr=False)
    rank: int
    at_ns: int
    """Time of the largest shortage."""
    short_bytes: int

    def __str__(self) -> str:
        limit_bytes = self.graph.limit_bytes[self.rank]
        base_bytes = self.graph.base_bytes[self.rank] if self.graph.base_bytes else 0
        if base_bytes > limit_bytes:
            remedies = (
                f"weights, gradients and optimizer's state alone are {base_bytes / _GB:.3g} GB: use more ranks or "
                "more tensor parallelism, or train fewer of its layers"
            )
        else:
            needed = (limit_bytes + self.short_bytes) / _GB
            remedies = f"a limit of {needed:.4g} GB, smaller microbatches, or more ranks"
        return (
            f"rank {self.rank} is short of {self.short_bytes / _GB:.3g} GB of its {limit_bytes / _GB:.3g} GB "
            f"{self.at_ns / 1e6:.3f} ms into the step; what would help: {remedies}"
        )


def tune(graph: TaskGraph, pairs: Sequence[Pair], orders: Orders) -> Tuned | MemoryShortage:
    """Returns the best fitting choice in orders that run without memory limits, or the shortage of the leanest one."""
    return _Tuning(graph, tuple(pairs), orders).run()


class _Tuning:
    def __init__(self, graph: TaskGraph, pairs: tuple[Pair, ...], orders: Orders) -> None:
        self.graph, self.free = graph, replace(graph, limit_bytes=())
        self.pairs, self.orders = pairs, orders
        self.ranks = [_RankPairs(graph, pairs, rank) for rank, limit in enumerate(graph.limit_bytes) if limit]
        self.weights = {task: 1.0 for pair in pairs for task in (pair.forward, pair.backward)}
        self.followers: list[list[tuple[int, int]]] = [[] for _ in graph.tasks]
        for wait in graph.waits:
            self.followers[wait.source].append((wait.target, wait.lag_ns))

    def run(self) -> Tuned | MemoryShortage:
        choice = tuple(pair.fastest for pair in self.pairs)
        altered, timed, short = self._simulated(choice)
        bound_ns = timed.makespan_ns
        fitting: dict[Choice, tuple[TaskGraph, Timed]] = {}
        tried = {choice}
        for at in range(ROUNDS + 1):
            if not short:
                fitting[choice] = altered, timed
                if timed.makespan_ns == bound_ns:
                    break
            if at == ROUNDS:
                break
            self._note(altered, timed, short)
            selected = self._select()
            if selected is None:
                break
            if selected in tried:  # the weights keep moving towards the last simulation
                continue
            choice = selected
            tried.add(choice)
            altered, timed, short = self._simulated(choice)
        if not fitting:
            choice = tuple(pair.leanest for pair in self.pairs)
            altered, timed, short = self._simulated(choice)
            if short:
                return self._shortage(altered, timed)
            fitting[choice] = altered, timed
        choice, (altered, timed) = min(fitting.items(), key=lambda item: item[1][1].makespan_ns)
        graph = replace(altered, limit_bytes=self.graph.limit_bytes)
        return Tuned(choice=choice, graph=graph, timed=timed, bound_ns=bound_ns)

    def _simulated(self, choice: Choice) -> tuple[TaskGraph, Timed, list[_RankPairs]]:
        """Returns the tasks of a choice, their times, and the ranks whose memory does not hold."""
        altered = with_candidates(self.free, self.pairs, choice)
        timed = simulate(altered, self.orders)
        assert isinstance(timed, Timed)  # without limits nothing waits for memory
        peaks = memory_peaks(altered, timed.start_ns)
        return altered, timed, [own for own in self.ranks if peaks[own.rank][0] > own.limit_bytes]

    def _note(self, altered: TaskGraph, timed: Timed, short: Sequence[_RankPairs]) -> None:
        """Updates instants of memory and weights from a simulation."""
        for own in self.ranks:
            if own in short or not len(own.room):
                own.add_instants(altered, timed.start_ns)
        slack = self._slack_ns(altered, timed)
        times = [altered.tasks[task].time_ns for task in self.weights]
        scale = max(1.0, _SCALE * sum(times) / max(1, len(times)))
        for task, before in self.weights.items():
            now = max(_MIN_WEIGHT, math.exp(-slack[task] / scale))
            self.weights[task] = _KEPT_WEIGHT * before + (1 - _KEPT_WEIGHT) * now

    def _slack_ns(self, graph: TaskGraph, timed: Timed) -> list[int]:
        """Returns the possible delay of each task in the order of its row without a longer step."""
        start = timed.start_ns
        order = sorted(range(len(start)), key=lambda i: (start[i], start[i] + graph.tasks[i].time_ns, i))
        next_of_row: list[int | None] = [None] * graph.num_rows
        latest = list(start)
        for index in reversed(order):
            task = graph.tasks[index]
            follower, end = next_of_row[task.row], timed.makespan_ns
            if follower is not None:
                end = min(end, latest[follower])
            for target, lag in self.followers[index]:
                end = min(end, latest[target] - lag)
            latest[index] = end - task.time_ns
            next_of_row[task.row] = index
        return [last - now for last, now in zip(latest, start, strict=True)]

    def _select(self) -> Choice | None:
        """Returns the best choice of each rank with these weights; None if none fits all instants."""
        choice = [pair.fastest for pair in self.pairs]
        for own in self.ranks:
            selected = own.select(self.weights)
            if selected is None:
                return None
            for index, candidate in zip(own.indices, selected, strict=True):
                choice[index] = candidate
        return tuple(choice)

    def _shortage(self, graph: TaskGraph, timed: Timed) -> MemoryShortage:
        peaks = memory_peaks(graph, timed.start_ns)
        own = max(self.ranks, key=lambda each: peaks[each.rank][0] - each.limit_bytes)
        peak_bytes, peak_ns = peaks[own.rank]
        short_bytes = peak_bytes - own.limit_bytes
        return MemoryShortage(graph=self.graph, rank=own.rank, at_ns=peak_ns, short_bytes=short_bytes)


class _RankPairs:
    """The pairs of one rank, all other uses of its memory, and the instants at which not every choice fits."""

    def __init__(self, graph: TaskGraph, pairs: Sequence[Pair], rank: int) -> None:
        self.rank, self.limit_bytes = rank, graph.limit_bytes[rank]
        self.base_bytes = graph.base_bytes[rank] if graph.base_bytes else 0
        own = [index for index, task in enumerate(graph.tasks) if graph.rank_of[task.row] == rank]
        self.indices = [
            index for index, pair in enumerate(pairs) if graph.rank_of[graph.tasks[pair.forward].row] == rank
        ]
        self.pairs = [pairs[index] for index in self.indices]
        fixed = {index: [graph.tasks[index].takes_bytes, graph.tasks[index].frees_bytes] for index in own}
        for pair in self.pairs:
            kept, works = pair.counted.kept_bytes, pair.counted.workspace_bytes
            fixed[pair.forward][0] -= kept + works
            fixed[pair.forward][1] -= works
            fixed[pair.backward][0] -= works
            fixed[pair.backward][1] -= kept + works
        self._fixed = {index: (takes, frees) for index, (takes, frees) in fixed.items() if takes or frees}
        most = max((len(pair.candidates) for pair in self.pairs), default=0)

        def table(value: Callable[[Candidate], int]) -> Floats:
            rows = [[value(candidate) for candidate in pair.candidates] for pair in self.pairs]
            return np.array([[*row, *[math.inf] * (most - len(row))] for row in rows]).reshape(len(rows), most)

        # a row a pair, a column a candidate
        self._forward, self._backward = table(lambda each: each.forward_ns), table(lambda each: each.backward_ns)
        self._held = table(lambda each: each.kept_bytes)
        self._working = table(lambda each: each.kept_bytes + each.workspace_bytes)
        # a row an instant: 1 where a pair (column) is in use and no task of it runs; 1 where one runs; bytes for pairs
        self._holds, self._works = np.zeros((0, len(self.pairs))), np.zeros((0, len(self.pairs)))
        self.room = np.zeros(0)

    def add_instants(self, graph: TaskGraph, start_ns: Sequence[int]) -> None:
        """Adds the instants of a simulation at which not every choice fits."""
        start, tasks = start_ns, graph.tasks
        spans = np.array(
            [
                (
                    start[pair.forward],
                    start[pair.forward] + tasks[pair.forward].time_ns,
                    start[pair.backward],
                    start[pair.backward] + tasks[pair.backward].time_ns,
                )
                for pair in self.pairs
            ],
            dtype=np.int64,
        ).reshape(-1, 4)
        changes = [(0, self.base_bytes)]
        for task, (takes, frees) in self._fixed.items():
            changes += [(start[task], takes), (start[task] + tasks[task].time_ns, -frees)]
        when, sizes = np.array(changes, dtype=np.int64).T
        times = np.unique(np.concatenate([spans[:, 0], spans[:, 2], when]))[:, None]
        used = (spans[:, 0] <= times) & (times < spans[:, 3])
        works = used & ((times < spans[:, 1]) | (times >= spans[:, 2]))
        room = self.limit_bytes - ((when <= times) * sizes).sum(axis=1)
        most = np.where(np.isfinite(self._working), self._working, 0).max(axis=1, initial=0)
        matters = used @ most > room
        self._holds = np.concatenate([self._holds, (used & ~works)[matters]])
        self._works = np.concatenate([self._works, works[matters]])
        self.room = np.concatenate([self.room, room[matters]])

    def select(self, weights: Mapping[int, float]) -> list[int] | None:
        """Returns a candidate for each pair, of little weighted added time, within all instants; None if none fits."""
        if not self.pairs:
            return None if (self.room < 0).any() else []
        forward = np.array([weights[pair.forward] for pair in self.pairs])[:, None]
        backward = np.array([weights[pair.backward] for pair in self.pairs])[:, None]
        cost = forward * self._forward + backward * self._backward
        choice, rows = cost.argmin(axis=1), np.arange(len(cost))
        slack = self.room - self._holds @ self._held[rows, choice] - self._works @ self._working[rows, choice]

        def after(pair: int, candidate: int) -> Floats:
            held = self._held[pair, choice[pair]] - self._held[pair, candidate]
            working = self._working[pair, choice[pair]] - self._working[pair, candidate]
            freed: Floats = slack + self._holds[:, pair] * held + self._works[:, pair] * working
            return freed

        while (slack < 0).any():
            # where most is missing, the candidates with the least added time for freed bytes
            worst, short = int(slack.argmin()), slack < 0
            using = np.flatnonzero(self._holds[worst] + self._works[worst])
            uses = np.where(self._works[worst, using][:, None] > 0, self._working[using], self._held[using])
            freed = uses[np.arange(len(using)), choice[using]][:, None] - uses
            added = cost[using] - cost[using, choice[using]][:, None]
            shared = (self._holds[short][:, using] + self._works[short][:, using]).sum(axis=0)[:, None]
            useful = np.maximum(np.minimum(freed, -slack[worst]) * shared, 1e-300)
            price = np.where(added > 0, added / useful, added * useful)
            price[~((freed > 0) & np.isfinite(freed))] = math.inf
            taken = set[int]()
            for flat in np.argsort(price, axis=None, kind="stable"):
                place, candidate = divmod(int(flat), price.shape[1])
                if slack[worst] >= 0 or len(taken) == _TAKEN_AT_ONCE or price[place, candidate] == math.inf:
                    break
                if place not in taken and not ((after(using[place], candidate) < 0) & ~short).any():
                    slack, choice[using[place]] = after(using[place], candidate), candidate  # no instant becomes short
                    taken.add(place)
            if not taken:
                return None
        while True:  # faster candidates where room is left, first those that save most
            now = rows, choice
            saved = cost[now][:, None] - cost
            fits = (self._held - self._held[now][:, None] <= _least(self._holds, slack)) & (
                self._working - self._working[now][:, None] <= _least(self._works, slack)
            )
            saved[~fits | ~np.isfinite(saved)] = 0.0
            pair, candidate = divmod(int(saved.argmax()), saved.shape[1])
            if saved[pair, candidate] <= 0:
                return [int(candidate) for candidate in choice]
            slack, choice[pair] = after(pair, candidate), candidate


def _least(mask: Floats, slack: Floats) -> Floats:
    """Returns the least room of each pair over the instants of a mask, as a column."""
    least: Floats = np.where(mask > 0, slack[:, None], math.inf).min(axis=0, initial=math.inf)[:, None]
    return least
