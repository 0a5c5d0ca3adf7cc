"""Forwards with their backwards, each with a choice of candidates, in a graph of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.tasks import Task, TaskGraph
from mosaic.pipelining.tuning.candidates import Candidate
from mosaic.search_extension import load_search

if TYPE_CHECKING:
    from mosaic import _search

Choice = tuple[int, ...]
"""Candidate index of each pair."""
_NOTHING = Candidate(strategies=(), forward_ns=0, backward_ns=0, kept_bytes=0, workspace_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A forward with its backward, between which activations are in use.

    Raises:
        ValueError: ``candidates`` is empty.
    """

    forward: int
    """Index of a task."""
    backward: int
    """Index of a task on the same rank."""
    candidates: tuple[Candidate, ...]
    weights: int | None = None
    """Index of backward for weights if it is apart; it then frees the activations instead of ``backward``."""
    counted: Candidate | None = None
    """Candidate that the graph's times and bytes include; None: none."""

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError(
                f"the pair of tasks {self.forward} and {self.backward} has no candidates; add at least one"
            )

    @property
    def last(self) -> int:
        """The task that frees the activations."""
        return self.backward if self.weights is None else self.weights

    @property
    def fastest(self) -> int:
        """Index of the candidate with the least added time."""
        return min(range(len(self.candidates)), key=lambda i: _added(self.candidates[i]))

    @property
    def leanest(self) -> int:
        """Index of the candidate that keeps least; of equals the fastest."""
        return min(
            range(len(self.candidates)), key=lambda i: (self.candidates[i].kept_bytes, _added(self.candidates[i]))
        )


def _added(candidate: Candidate) -> int:
    return candidate.forward_ns + candidate.backward_ns


def pairs_of(graph: TaskGraph, candidates: Callable[[Task], tuple[Candidate, ...]]) -> tuple[Pair, ...]:
    """Returns all forwards with their backwards of a graph in which everything is kept.

    Bytes that a forward takes and does not free are kept; those that it frees are workspace.

    Args:
        graph: Tasks whose bytes are those of their chunk's activations and workspace alone.
        candidates: Returns the candidates of a forward's chunk with its piece.
    """
    phases: dict[object, dict[ActionKind, int]] = {}
    for index, task in enumerate(graph.tasks):
        phases.setdefault((task.row, task.parts, task.microbatch, task.piece), {})[task.kind] = index
    pairs = []
    for own in phases.values():
        if ActionKind.FORWARD in own and ActionKind.BACKWARD in own:
            forward = graph.tasks[own[ActionKind.FORWARD]]
            pairs.append(
                Pair(
                    forward=own[ActionKind.FORWARD],
                    backward=own[ActionKind.BACKWARD],
                    weights=own.get(ActionKind.WEIGHTS),
                    candidates=candidates(forward),
                    counted=replace(
                        _NOTHING,
                        kept_bytes=forward.takes_bytes - forward.frees_bytes,
                        workspace_bytes=forward.frees_bytes,
                    ),
                )
            )
    return tuple(pairs)


def check_pairs(graph: TaskGraph, pairs: Sequence[Pair]) -> None:
    """Checks that pairs are of a graph.

    Raises:
        ValueError: A task does not exist, is in two pairs, or is on another rank than its pair's other tasks.
    """
    seen: dict[int, int] = {}
    for index, pair in enumerate(pairs):
        own = dict.fromkeys((pair.forward, pair.backward, pair.last))
        for task in own:
            if not 0 <= task < len(graph.tasks):
                raise ValueError(f"pair {index} has task {task}; the graph has {len(graph.tasks)}, from 0")
            if task in seen:
                raise ValueError(f"task {task} is in pairs {seen[task]} and {index}; a task is in one")
            seen[task] = index
        if len({graph.rank_of[graph.tasks[task].row] for task in own}) > 1:
            raise ValueError(f"pair {index} has tasks {tuple(own)} on several ranks; its activations are on one")


def with_candidates(graph: TaskGraph, pairs: Sequence[Pair], choice: Sequence[int]) -> TaskGraph:
    """Returns the graph with the times and bytes of one candidate for each pair.

    Raises:
        ValueError: A pair counts more than the graph has.
    """
    tasks = list(graph.tasks)
    for pair, index in zip(pairs, choice, strict=True):
        new, old = pair.candidates[index], pair.counted or _NOTHING
        held, works = new.kept_bytes - old.kept_bytes, new.workspace_bytes - old.workspace_bytes
        _alter(tasks, pair.forward, new.forward_ns - old.forward_ns, takes=held + works, frees=works)
        _alter(tasks, pair.backward, new.backward_ns - old.backward_ns, takes=works)
        _alter(tasks, pair.last, 0, frees=held + works)
    return replace(graph, tasks=tuple(tasks))


def _alter(tasks: list[Task], index: int, time_ns: int, *, takes: int = 0, frees: int = 0) -> None:
    task = tasks[index]
    values = task.time_ns + time_ns, task.takes_bytes + takes, task.frees_bytes + frees
    if min(values) < 0:
        raise ValueError(f"task {index} would take {values[0]} ns and {values[1]} bytes; it counts less than its pair")
    tasks[index] = replace(task, time_ns=values[0], takes_bytes=values[1], frees_bytes=values[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPairs:
    """The pairs of one rank, and all other uses of its memory."""

    indices: tuple[int, ...]
    """Indices of the pairs."""
    pairs: tuple[Pair, ...]
    tasks: Mapping[int, tuple[int, int]]
    """Bytes that each task of the rank takes and frees under any choice."""
    base_bytes: int
    """Constant bytes."""
    limit_bytes: int
    """Memory of the rank."""

    def snapshot(
        self, graph: TaskGraph, start_ns: Sequence[int]
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]:
        """Returns the spans of pairs and all other memory changes, in a simulation with the times of ``graph``."""
        tasks = graph.tasks
        spans = [
            (
                start_ns[pair.forward],
                start_ns[pair.forward] + tasks[pair.forward].time_ns,
                start_ns[pair.backward],
                start_ns[pair.last] + tasks[pair.last].time_ns,
            )
            for pair in self.pairs
        ]
        changes = [(0, self.base_bytes)]
        for task, (takes, frees) in self.tasks.items():
            if takes:
                changes.append((start_ns[task], takes))
            if frees:
                changes.append((start_ns[task] + tasks[task].time_ns, -frees))
        return spans, changes


def rank_pairs(graph: TaskGraph, pairs: Sequence[Pair]) -> dict[int, RankPairs]:
    """Returns the pairs of each rank with a limit."""
    fixed = {index: [task.takes_bytes, task.frees_bytes] for index, task in enumerate(graph.tasks)}
    for pair in pairs:
        old = pair.counted or _NOTHING
        fixed[pair.forward][0] -= old.kept_bytes + old.workspace_bytes
        fixed[pair.forward][1] -= old.workspace_bytes
        fixed[pair.backward][0] -= old.workspace_bytes
        fixed[pair.last][1] -= old.kept_bytes + old.workspace_bytes
    rank_of = [graph.rank_of[task.row] for task in graph.tasks]
    by_rank = {}
    for rank, limit in enumerate(graph.limit_bytes):
        if not limit:
            continue
        own = tuple(index for index, pair in enumerate(pairs) if rank_of[pair.forward] == rank)
        by_rank[rank] = RankPairs(
            indices=own,
            pairs=tuple(pairs[index] for index in own),
            tasks={index: (takes, frees) for index, (takes, frees) in fixed.items() if rank_of[index] == rank},
            base_bytes=graph.base_bytes[rank] if graph.base_bytes else 0,
            limit_bytes=limit,
        )
    return by_rank


def pair_table(own: RankPairs) -> _search.PairTable:
    """Returns the candidates of a rank's pairs for the extension."""
    table: _search.PairTable = load_search().PairTable(
        [
            tuple(
                [getattr(candidate, name) for candidate in pair.candidates]
                for name in ("forward_ns", "backward_ns", "kept_bytes", "workspace_bytes")
            )
            for pair in own.pairs
        ]
    )
    return table
