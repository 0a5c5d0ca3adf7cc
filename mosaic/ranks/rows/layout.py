"""Where each row of a global batch is, and how rows get from one such layout to another: arithmetic without torch.

A batch's rows are numbered from the first rank's first to the last rank's last. In every layout a rank has its rows in
the order of their numbers, so that all arguments of a module have one order, wherever they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mosaic.ranks.rows.routing import RowRouting


@dataclass(frozen=True)
class RowLayout:
    """Which rows each rank has; each row is on one rank."""

    rows: tuple[tuple[int, ...], ...]
    """For each rank the numbers of its rows, rising."""

    @staticmethod
    def home(held: Sequence[int]) -> RowLayout:
        """Returns that of the ranks that hold the batch.

        Args:
            held: Rows that each rank holds.
        """
        ends = accumulate(held)
        return RowLayout(tuple(tuple(range(end - count, end)) for count, end in zip(held, ends, strict=True)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(map(len, self.rows))

    def onto(self, members: tuple[int, ...]) -> RowLayout:
        """Returns equal parts on a module's members to which the fewest rows travel from here; see ``RowRouting``."""
        moves = RowRouting(held=self.sizes, members=members).moves
        parts: list[list[int]] = [[] for _ in self.rows]
        for rows, counts in zip(self.rows, moves, strict=True):
            start = 0
            for target, count in enumerate(counts):
                parts[target] += rows[start : start + count]
                start += count
        return RowLayout(tuple(tuple(sorted(part)) for part in parts))


@dataclass(frozen=True)
class Transfer:
    """The way of rows from one layout to another of the same rows."""

    source: RowLayout
    """Where they are."""
    target: RowLayout
    """Where they go."""

    @cached_property
    def _rank_after(self) -> dict[int, int]:
        return {row: rank for rank, rows in enumerate(self.target.rows) for row in rows}

    @cached_property
    def moves(self) -> tuple[tuple[int, ...], ...]:
        """Rows from each rank (first index) to each rank (second), those that stay included."""
        size = len(self.source.rows)
        moves = [[0] * size for _ in range(size)]
        for counts, rows in zip(moves, self.source.rows, strict=True):
            for row in rows:
                counts[self._rank_after[row]] += 1
        return tuple(map(tuple, moves))

    @property
    def num_moved(self) -> int:
        """Rows that travel from one rank to another."""
        return sum(n for source, row in enumerate(self.moves) for target, n in enumerate(row) if source != target)

    @cached_property
    def is_local(self) -> bool:
        """Whether every row stays where it is."""
        return self.source == self.target

    @cached_property
    def back(self) -> Transfer:
        """The way back."""
        return Transfer(self.target, self.source)

    def sends(self, rank: int) -> tuple[int, ...]:
        """Rows that a rank gives to each rank."""
        return self.moves[rank]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Rows that a rank gets from each rank."""
        return tuple(row[rank] for row in self.moves)

    def send_order(self, rank: int) -> tuple[int, ...] | None:
        """Returns which of its rows a rank sends first, and so on, by the rank they go to; None for as they lie."""
        return self._send_orders[rank]

    def receive_order(self, rank: int) -> tuple[int, ...] | None:
        """Returns which row to take first, and so on, of those that a rank got; None for as they came."""
        return self._receive_orders[rank]

    @cached_property
    def _send_orders(self) -> tuple[tuple[int, ...] | None, ...]:
        found = []
        for rows in self.source.rows:
            after = [self._rank_after[row] for row in rows]
            found.append(_unless_rising(sorted(range(len(after)), key=after.__getitem__)))
        return tuple(found)

    @cached_property
    def _receive_orders(self) -> tuple[tuple[int, ...] | None, ...]:
        before, found = self.back._rank_after, []
        for own in self.target.rows:
            came = sorted(range(len(own)), key=[before[row] for row in own].__getitem__)  # places, as they come
            found.append(_unless_rising(sorted(range(len(came)), key=came.__getitem__)))
        return tuple(found)


def _unless_rising(order: list[int]) -> tuple[int, ...] | None:
    return None if order == sorted(order) else tuple(order)
