"""The order in which one thread runs the rows of a rank, and whether they come to their end at all.

A rank of one row runs that row. Where a rank has several, its lanes, one walk over the rows of all ranks merges them:
the two ends of a message are taken at one moment of the walk, and each row goes on until it has computed one task or
has to stop. So both ends of every pair of ranks post in one order, and each action comes after what it waits for: no
rank waits for ever. What ``lower`` made can always be walked so.

Lanes that walk by themselves come to their end, too: of all actions that are still to be done, the first of such a walk
waits for nothing any more.
"""

from __future__ import annotations

from collections import defaultdict

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule.action import Verb
from mosaic.pipelining.schedule.schedule import PipelineSchedule

_POSTS = (f"{Verb.SEND}(", f"{Verb.RECEIVE}(")


def rows_of_rank(schedule: PipelineSchedule, rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns what each lane of a rank does, in order."""
    return tuple(row for row, other in zip(schedule.rows, schedule.rank_of, strict=True) if other == rank)


def order_of(schedule: PipelineSchedule, rank: int) -> tuple[int, ...]:
    """Returns the order in which one thread does what a rank's lanes do: for each action its lane.

    Raises:
        InvalidScheduleError: No order suits both the lanes and the other ranks.
    """
    rows = rows_of_rank(schedule, rank)
    return _Walk(schedule, rank).run() if len(rows) > 1 else (0,) * sum(map(len, rows))


class _Walk:
    """All rows under way."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.at = [0] * len(schedule.rows)
        self.done: set[str] = set()
        self.posting: dict[str, int] = {}
        """For each message of which one end is due the row that stands there."""
        self.merged: list[int] = []
        ranks = schedule.rank_of
        self.lane = [ranks[:row].count(ranks[row]) for row in range(len(ranks))]
        home = {
            cell: other
            for other, row in zip(schedule.rank_of, schedule.rows, strict=True)
            for cell in row
            if cell[-1] != ")"
        }
        self.needs: defaultdict[str, list[str]] = defaultdict(list)
        for edge in schedule.edges:
            source, _, target = edge.partition(">")
            if home.get(source) == home.get(target):
                self.needs[target].append(source)

    def run(self) -> tuple[int, ...]:
        has_moved = True
        while has_moved:
            has_moved = False
            for row in range(len(self.at)):
                has_moved |= self._go_on(row)
        rows = self.schedule.rows
        stuck = next((row for row in range(len(rows)) if self.at[row] < len(rows[row])), None)
        if stuck is not None:
            raise InvalidScheduleError(
                f"rank {self.rank} has lanes that cannot come to their end: row {stuck} would wait for ever at "
                f"{rows[stuck][self.at[stuck]]}; post both ends of each message at one point, as lower does",
                grid=self.schedule.text,
            )
        return tuple(self.merged)

    def _go_on(self, row: int) -> bool:
        """Takes actions of a row until it has computed a task or cannot go on; returns whether it took any."""
        cells, has_moved = self.schedule.rows[row], False
        while self.at[row] < len(cells):
            cell = cells[self.at[row]]
            if cell.startswith(_POSTS):
                other = self.posting.setdefault(cell.partition("(")[2], row)
                if other == row:
                    return has_moved
                self._take(other)
            elif not all(source in self.done for source in self.needs.get(cell, ())):
                return has_moved
            self._take(row)
            has_moved = True
            if cell[-1] != ")":
                return True
        return has_moved

    def _take(self, row: int) -> None:
        cell = self.schedule.rows[row][self.at[row]]
        self.at[row] += 1
        self.done.add(cell)
        if self.schedule.rank_of[row] == self.rank:
            self.merged.append(self.lane[row])
