"""The way of a batch's rows between ranks: arithmetic without torch.

Every rank holds some rows of the global batch. A module on d of the ranks (its *members*) runs on d parts of these
rows, as equal as can be. A member keeps as many of its own rows as it has room for, so only rows move that members are
short of. Ranks send to each member, in the order of ranks, the next of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class RowRouting:
    """The numbers of a batch's rows that go from each rank to each rank that runs a module.

    Those that a rank gives to one member are contiguous.
    """

    held: tuple[int, ...]
    """Rows that each rank holds."""
    members: tuple[int, ...]
    """Ranks that run the module, rising."""

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Rows that each rank runs; 0 for a rank that is no member.

        Parts differ by one row at most; the larger ones go to the members that hold most themselves.
        """
        total, degree = sum(self.held), len(self.members)
        by_own = sorted(self.members, key=lambda rank: (-self.held[rank], rank))
        larger = set(by_own[: total % degree])
        return tuple(
            total // degree + (rank in larger) if rank in self.members else 0 for rank in range(len(self.held))
        )

    @cached_property
    def moves(self) -> tuple[tuple[int, ...], ...]:
        """Rows from each rank (first index) to each rank (second), those that stay included."""
        moves = [[0] * len(self.held) for _ in self.held]
        for rank in self.members:
            moves[rank][rank] = min(self.held[rank], self.parts[rank])
        short = [part - moves[rank][rank] for rank, part in enumerate(self.parts)]
        for rank, held in enumerate(self.held):
            left = held - moves[rank][rank]
            for member in self.members:
                moved = min(left, short[member])
                moves[rank][member] += moved
                short[member] -= moved
                left -= moved
        return tuple(map(tuple, moves))

    def sends(self, rank: int) -> tuple[int, ...]:
        """Rows that a rank gives to each rank."""
        return self.moves[rank]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Rows that a rank gets from each rank."""
        return tuple(row[rank] for row in self.moves)

    @cached_property
    def num_moved(self) -> int:
        """Rows that travel from one rank to another, one way; the least possible for equal parts."""
        return sum(self.held) - sum(row[rank] for rank, row in enumerate(self.moves))
