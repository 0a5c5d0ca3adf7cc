"""Rows on their way to the ranks that run a module: none lost, none twice, and no more of them travel than must."""

from __future__ import annotations

from itertools import accumulate, chain, islice

from hypothesis import given
from hypothesis import strategies as st

from mosaic.ranks.rows.routing import RowRouting

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)


@st.composite
def routings(draw: st.DrawFn) -> RowRouting:
    held = draw(COUNTS)
    members = draw(st.sets(st.integers(0, len(held) - 1), min_size=1))
    return RowRouting(held=held, members=tuple(sorted(members)))


@given(routings())
def test_every_row_gets_to_one_member_and_every_member_gets_its_part(routing: RowRouting):
    for rank, held in enumerate(routing.held):
        assert sum(routing.moves[rank]) == held
        assert sum(row[rank] for row in routing.moves) == routing.parts[rank]
        assert min(routing.moves[rank]) >= 0
    assert all(part == 0 for rank, part in enumerate(routing.parts) if rank not in routing.members)


@given(routings())
def test_rows_are_in_the_batch_s_order_on_members_and_at_home_again(routing: RowRouting):
    ranks, ends = range(len(routing.held)), list(accumulate(routing.held))
    home = [list(range(end - count, end)) for count, end in zip(routing.held, ends, strict=True)]
    there = exchanged(home, [routing.sends(rank) for rank in ranks])
    assert there == [sorted(part) for part in there]
    assert [len(part) for part in there] == [sum(routing.receives(rank)) for rank in ranks] == list(routing.parts)
    assert exchanged(there, [routing.receives(rank) for rank in ranks]) == home


def exchanged(rows: list[list[int]], sends: list[tuple[int, ...]]) -> list[list[int]]:
    """Returns what each rank has after an all-to-all: of each rank, in order, the next rows that it sends there."""
    left = [iter(own) for own in rows]
    sent = [[list(islice(own, count)) for count in counts] for own, counts in zip(left, sends, strict=True)]
    return [list(chain.from_iterable(parts)) for parts in zip(*sent, strict=True)]


@given(routings())
def test_no_other_routing_of_equal_parts_moves_fewer_rows(routing: RowRouting):
    assert routing.num_moved == sum(max(0, part - own) for part, own in zip(routing.parts, routing.held, strict=True))
    low, more = divmod(sum(routing.held), len(routing.members))
    own = sorted((routing.held[rank] for rank in routing.members), reverse=True)
    best = sum(max(0, low + (index < more) - held) for index, held in enumerate(own))
    assert routing.num_moved == best
