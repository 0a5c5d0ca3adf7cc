"""Chooses activation strategies of all layers, within each rank's memory, for a short step.

As a score: simulate the fastest strategies; if memory does not hold, weight each pair by its slack, choose for each
rank the least weighted added time within its memory, and simulate again; repeat a few times, and return the best that
holds (PipeWeaver, section 6.3; the weights are ours, because added times do not add up to a step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mosaic.pipelining.rank_memory import rank_timelines
from mosaic.pipelining.tasks import Deadlock, TaskGraph, Timed
from mosaic.pipelining.tuning.pairs import Choice, Pair, check_pairs, pair_table, rank_pairs, with_candidates
from mosaic.pipelining.tuning.shortage import MemoryShortage, shortage_of
from mosaic.pipelining.tuning.slack import Followers

Simulate = Callable[[TaskGraph], Timed | Deadlock]
"""Runs tasks of a graph without memory limits in fixed orders."""

_MIN_WEIGHT = 0.02
"""Weight of a pair with large slack."""
_KEPT_WEIGHT = 0.5
"""Share of a weight that stays from one simulation to the next."""
_SCALE = 0.3
"""Slack at which a weight falls to 1/e, as a share of a task's mean time. With these three the added time of a step was
62 to 96 % less than with equal weights (1F1B of 4 and 8 ranks with 8 and 16 ragged microbatches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A choice that fits on every rank at all times."""

    choice: Choice
    """Candidate index of each pair."""
    graph: TaskGraph
    """The graph with the chosen times and bytes, and the limits."""
    timed: Timed
    """Its simulation."""
    bound_ns: int
    """Lower bound of all choices in this order."""
    num_choices: int
    """Number of simulated choices, without the first, which keeps everything."""
    gaps: Mapping[int, float]
    """Relative gap of the weighted added time of each rank with a shortage.

    With few pairs in flight most of it is the bound's: choices were within 2 % of the optimum at gaps of 5 to 15 %.
    """


def tune(
    graph: TaskGraph,
    pairs: Sequence[Pair],
    simulate: Simulate,
    *,
    rounds: int = 8,
    gap: float = 0.03,
) -> Tuned | MemoryShortage | Deadlock:
    """Chooses a candidate for each pair.

    Args:
        graph: Tasks, with memory limits.
        pairs: Forwards with their backwards; other tasks stay unchanged.
        simulate: Returns starts of tasks for a graph without limits, in an order independent of times.
        rounds: Most simulated choices.
        gap: Relative gap of the added time at which a rank's choice is good enough.

    Returns:
        The best fitting choice; or the shortage of the leanest one; or the deadlock of an order that cannot run without
        memory limits.

    Raises:
        ValueError: Pairs are of another graph, ``rounds`` is under 1, or ``gap`` is negative.
        BackendUnavailableError: The extension is not built.
    """
    if rounds < 1 or not 0 <= gap < math.inf:
        raise ValueError(f"rounds={rounds}, gap={gap}; use at least one round, and a gap of 0 or more")
    check_pairs(graph, pairs)
    return _Tuning(graph=graph, pairs=tuple(pairs), simulate=simulate, gap=gap).run(rounds)


class _Tuning:
    """State of a tuning."""

    def __init__(self, *, graph: TaskGraph, pairs: tuple[Pair, ...], simulate: Simulate, gap: float) -> None:
        self.graph = graph
        self.free = replace(graph, limit_bytes=())
        self.pairs = pairs
        self.simulate = simulate
        self.gap = gap
        self.followers = Followers.of(graph)
        self.ranks = rank_pairs(graph, pairs)
        self.weights = {task: 1.0 for pair in pairs for task in (pair.forward, pair.backward)}
        self.snapshots: dict[int, list[Any]] = {rank: [] for rank in self.ranks}
        self.gaps: dict[int, float] = {}

    def run(self, rounds: int) -> Tuned | MemoryShortage | Deadlock:
        fastest = tuple(pair.fastest for pair in self.pairs)
        altered, timed = self._simulated(fastest)
        if isinstance(timed, Deadlock):
            return timed
        if not (short := self._short(altered, timed)):
            return self._result(fastest, altered, timed, timed.makespan_ns, 0)
        bound_ns = timed.makespan_ns
        tables = {rank: pair_table(self.ranks[rank]) for rank in self.ranks}
        best: tuple[Choice, TaskGraph, Timed] | None = None
        seen = {fastest}
        for _ in range(rounds):
            self._note(altered, timed, short)
            choice = self._chosen(tables)
            if choice is None:
                break
            if choice in seen:  # the weights keep moving towards the last simulation
                continue
            seen.add(choice)
            altered, timed = self._simulated(choice)
            assert not isinstance(timed, Deadlock)  # times do not change the waits
            short = self._short(altered, timed)
            if not short and (best is None or timed.makespan_ns < best[2].makespan_ns):
                best = choice, altered, timed
                if timed.makespan_ns == bound_ns:
                    break
        if best is not None:
            return self._result(*best, bound_ns, len(seen) - 1)
        return self._leanest(bound_ns)

    def _simulated(self, choice: Choice) -> tuple[TaskGraph, Timed | Deadlock]:
        altered = with_candidates(self.free, self.pairs, choice)
        return altered, self.simulate(altered)

    def _short(self, altered: TaskGraph, timed: Timed) -> list[int]:
        """Returns the ranks whose memory does not hold."""
        lines = rank_timelines(altered, timed.start_ns)
        return [rank for rank, own in self.ranks.items() if lines[rank].peak_bytes > own.limit_bytes]

    def _note(self, altered: TaskGraph, timed: Timed, short: Sequence[int]) -> None:
        """Updates memory snapshots and weights from a simulation."""
        for rank in self.ranks:
            if rank in short or not self.snapshots[rank]:
                self.snapshots[rank].append(self.ranks[rank].snapshot(altered, timed.start_ns))
        slack = self.followers.slack_ns(altered, timed)
        times = [altered.tasks[task].time_ns for task in self.weights]
        scale = max(1.0, _SCALE * sum(times) / max(1, len(times)))
        for task, before in self.weights.items():
            now = max(_MIN_WEIGHT, math.exp(-slack[task] / scale))
            self.weights[task] = _KEPT_WEIGHT * before + (1 - _KEPT_WEIGHT) * now

    def _chosen(self, tables: Mapping[int, Any]) -> Choice | None:
        """Returns the best choice of each rank with these weights; None if none fits all snapshots."""
        choice = [pair.fastest for pair in self.pairs]
        for rank, table in tables.items():
            own = self.ranks[rank]
            selection = table.select(
                self.snapshots[rank],
                limit_bytes=own.limit_bytes,
                forward_weights=[self.weights[pair.forward] for pair in own.pairs],
                backward_weights=[self.weights[pair.backward] for pair in own.pairs],
                gap=self.gap,
            )
            if not selection.fits:
                return None
            self.gaps[rank] = selection.cost_ns / selection.bound_ns - 1 if selection.bound_ns > 0 else 0.0
            for index, chosen in zip(own.indices, selection.chosen, strict=True):
                choice[index] = chosen
        return tuple(choice)

    def _leanest(self, bound_ns: int) -> Tuned | MemoryShortage:
        leanest = tuple(pair.leanest for pair in self.pairs)
        altered, timed = self._simulated(leanest)
        assert not isinstance(timed, Deadlock)
        missing = shortage_of(altered, timed.start_ns, self.ranks, self.pairs)
        return missing or self._result(leanest, altered, timed, bound_ns, 1)

    def _result(self, choice: Choice, altered: TaskGraph, timed: Timed, bound_ns: int, num_choices: int) -> Tuned:
        return Tuned(
            choice=choice,
            graph=replace(altered, limit_bytes=self.graph.limit_bytes),
            timed=timed,
            bound_ns=bound_ns,
            num_choices=num_choices,
            gaps=self.gaps,
        )
