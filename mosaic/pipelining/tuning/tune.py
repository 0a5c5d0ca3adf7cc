"""Chooses what becomes of all layers' activations, so that each rank's memory holds and the step ends early.

As a score: simulate with what is fastest; where memory does not hold, weigh each pair by how much the step waits for
it, choose for each rank the least weighted time added that its memory has room for, simulate again; a few times, and
keep the best that holds (PipeWeaver, section 6.3; the weights are ours, since added times do not add up to a step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mosaic.pipelining.semu.step import rank_timelines
from mosaic.pipelining.tasks import Deadlock, TaskGraph, Timed
from mosaic.pipelining.tuning.pairs import Choice, Pair, check_pairs, pair_table, rank_pairs, with_candidates
from mosaic.pipelining.tuning.shortage import MemoryShortage, shortage_of
from mosaic.pipelining.tuning.slack import Followers

Simulate = Callable[[TaskGraph], Timed | Deadlock]
"""Runs tasks in the orders that are to be tuned. Limits of memory are left out of the graph that it gets."""

_MIN_WEIGHT = 0.02
"""Of a pair that the step does not wait for at all."""
_KEPT_WEIGHT = 0.5
_SCALE = 0.3
"""Slack at which a weight falls to 1/e, as a share of a task's mean time. With these three the time that is added to a
step was 62 to 96 % less than with equal weights (1F1B of 4 and 8 ranks with 8 and 16 ragged microbatches)."""
"""Share of a weight that is kept from one simulation to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A choice that fits on every rank at all times."""

    choice: Choice
    """For each pair the index of its candidate."""
    graph: TaskGraph
    """With the chosen times and bytes, and the limits."""
    timed: Timed
    """Its simulation."""
    bound_ns: int
    """No choice ends earlier in this order."""
    num_choices: int
    """Choices that were simulated, keeping everything apart."""
    gaps: Mapping[int, float]
    """For each rank that was short of memory by how much of the weighted time added its choice may be too dear.

    Where few pairs are in flight most of that is the bound's: choices were within 2 % of the optimum where it said 5 to
    15 %.
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
        graph: Tasks, with limits of memory.
        pairs: Forwards with their backwards; tasks in no pair stay as they are.
        simulate: Gives starts of tasks for a graph without limits, in an order that is not altered by times.
        rounds: How often at most a choice is simulated.
        gap: Of the time added, at which a rank's choice is good enough.

    Returns:
        The best choice that fits; or by how much the leanest one does not fit; or where the order cannot run at all,
        memory apart.

    Raises:
        ValueError: Pairs are not of this graph, ``rounds`` is under 1, or ``gap`` is negative.
        BackendUnavailableError: The extension is not built.
    """
    if rounds < 1 or not 0 <= gap < math.inf:
        raise ValueError(f"rounds={rounds}, gap={gap}; use one round at least, and a gap of 0 or more")
    check_pairs(graph, pairs)
    return _Tuning(graph=graph, pairs=tuple(pairs), simulate=simulate, gap=gap).run(rounds)


class _Tuning:
    """What is known while tuning."""

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
            if choice in seen:  # the weights go on to where the last simulation points
                continue
            seen.add(choice)
            altered, timed = self._simulated(choice)
            assert not isinstance(timed, Deadlock)  # times do not alter what waits for what
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
        """Ranks whose memory does not hold."""
        lines = rank_timelines(altered, timed.start_ns)
        return [rank for rank, own in self.ranks.items() if lines[rank].peak_bytes > own.limit_bytes]

    def _note(self, altered: TaskGraph, timed: Timed, short: Sequence[int]) -> None:
        """Takes in a simulation: what uses memory together, and what the step waits for."""
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
        """The best choice of each rank with these weights; None if nothing fits at all instants noted."""
        choice = [pair.fastest for pair in self.pairs]
        for rank, table in tables.items():
            own = self.ranks[rank]
            found = table.select(
                self.snapshots[rank],
                limit_bytes=own.limit_bytes,
                forward_weights=[self.weights[pair.forward] for pair in own.pairs],
                backward_weights=[self.weights[pair.backward] for pair in own.pairs],
                gap=self.gap,
            )
            if not found.fits:
                return None
            self.gaps[rank] = found.cost_ns / found.bound_ns - 1 if found.bound_ns > 0 else 0.0
            for index, chosen in zip(own.indices, found.chosen, strict=True):
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
