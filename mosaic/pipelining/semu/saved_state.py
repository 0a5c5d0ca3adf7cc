"""Simulated states: saved, joined by new edges, and gone on from (PipeWeaver, section 4.2).

Microbatches are simulated once, each by itself. A schedule then only adds edges between them. Nodes that no new edge
reaches keep the times of the saved state; the others are moved as a whole, without a look inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """``target`` starts no earlier than ``lag_ns`` after the end of ``source``."""

    source: int
    """Index of a node."""
    target: int
    """Index of a node."""
    lag_ns: int = 0
    """Time between them, as of a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Nodes with their times; it never changes, so that many searches may go on from one."""

    length_ns: tuple[int, ...]
    """Of each node: of a subgraph that was simulated once."""
    dependencies: tuple[Dependency, ...]
    """All of them, given so far."""
    start_ns: tuple[int, ...]
    """Of each node."""

    @property
    def makespan_ns(self) -> int:
        """End of the last node."""
        return max((start + length for start, length in zip(self.start_ns, self.length_ns, strict=True)), default=0)


def simulate_nodes(length_ns: Sequence[int], dependencies: Iterable[Dependency]) -> SavedState:
    """Returns nodes that start as soon as what they wait for has ended.

    Raises:
        ValueError: A time is negative, an index out of range, or nodes wait for each other in a circle.
    """
    if (shortest := min(length_ns, default=0)) < 0:
        raise ValueError(f"a node takes {shortest} ns; use 0 or more")
    bare = SavedState(length_ns=tuple(length_ns), dependencies=(), start_ns=(0,) * len(length_ns))
    return resume((bare,), dependencies)


def resume(states: Sequence[SavedState], dependencies: Iterable[Dependency]) -> SavedState:
    """Returns several states as one, with new dependencies; nodes are numbered through in the order given.

    Only nodes that a new dependency reaches are timed again.

    Raises:
        ValueError: An index or lag is out of range, or nodes wait for each other in a circle.
    """
    lengths = [one for state in states for one in state.length_ns]
    starts = [one for state in states for one in state.start_ns]
    joined: list[Dependency] = []
    base = 0
    for state in states:
        if base:
            joined += (
                Dependency(source=one.source + base, target=one.target + base, lag_ns=one.lag_ns)
                for one in state.dependencies
            )
        else:
            joined += state.dependencies
        base += len(state.length_ns)
    new = tuple(dependencies)
    for one in new:
        if not (0 <= one.source < base and 0 <= one.target < base and one.lag_ns >= 0):
            raise ValueError(f"{one} is out of range; there are {base} nodes, and a lag is 0 or more")
    joined += new
    _retime(lengths, starts, joined, {one.target for one in new})
    return SavedState(length_ns=tuple(lengths), dependencies=tuple(joined), start_ns=tuple(starts))


def _retime(lengths: list[int], starts: list[int], dependencies: list[Dependency], roots: set[int]) -> None:
    into: list[list[Dependency]] = [[] for _ in lengths]
    out: list[list[int]] = [[] for _ in lengths]
    for one in dependencies:
        into[one.target].append(one)
        out[one.source].append(one.target)
    affected, todo = set(roots), list(roots)
    while todo:
        for target in out[todo.pop()]:
            if target not in affected:
                affected.add(target)
                todo.append(target)
    missing = {node: sum(one.source in affected for one in into[node]) for node in affected}
    ready = [node for node, count in missing.items() if not count]
    while ready:
        node = ready.pop()
        del missing[node]
        starts[node] = max((starts[one.source] + lengths[one.source] + one.lag_ns for one in into[node]), default=0)
        for target in out[node]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    if missing:
        raise ValueError(f"{len(missing)} nodes wait for each other in a circle, node {min(missing)} among them")
