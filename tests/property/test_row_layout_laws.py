"""Rows on their way between modules: in one order everywhere, none lost, and never more of them than go home."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.ranks.rows.layout import RowLayout, Transfer
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.rows.ways import Stop, Ways

HELD = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)


def subsets(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(0, size - 1), min_size=1).map(lambda found: tuple(sorted(found)))


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    held = draw(HELD)
    return held, draw(st.lists(subsets(len(held)), min_size=1, max_size=4))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Stop]]:
    """Returns modules that each take straight from some of those before them, and from home."""
    held = draw(HELD)
    stops: dict[str, Stop] = {}
    for index in range(draw(st.integers(1, 4))):
        sources = draw(st.sets(st.sampled_from(sorted(stops)))) if stops else set()
        stops[f"m{index}"] = Stop(
            members=draw(subsets(len(held))),
            home_bytes=draw(st.integers(0, 3)),
            sources={name: draw(st.integers(1, 3)) for name in sorted(sources)},
            taken=dict(enumerate(sorted(sources))),
        )
    return held, stops


def moved(transfer: Transfer) -> tuple[tuple[int, ...], ...]:
    """Returns where rows are after the messages that a transfer says, each rank's rows being told by their numbers."""
    size = len(transfer.source.rows)
    sent = []
    for rank, rows in enumerate(transfer.source.rows):
        order = transfer.send_order(rank)
        left = list(rows if order is None else [rows[index] for index in order])
        sent.append([[left.pop(0) for _ in range(count)] for count in transfer.sends(rank)])
        assert not left
    found = []
    for rank in range(size):
        came = [row for source in range(size) for row in sent[source][rank]]
        assert [len(sent[source][rank]) for source in range(size)] == list(transfer.receives(rank))
        order = transfer.receive_order(rank)
        found.append(tuple(came if order is None else [came[index] for index in order]))
    return tuple(found)


@given(chains())
def test_rows_are_in_their_order_wherever_they_are_sent(chain: tuple[tuple[int, ...], list[tuple[int, ...]]]):
    held, every = chain
    home = RowLayout.home(held)
    layouts = [home, *(home.onto(members) for members in every)]
    for members in every[1:]:
        layouts.append(layouts[-1].onto(members))
    for source in layouts:
        assert sorted(row for rows in source.rows for row in rows) == list(range(sum(held)))
        assert all(list(rows) == sorted(rows) for rows in source.rows)
        for target in layouts:
            transfer = Transfer(source, target)
            assert moved(transfer) == target.rows
            assert transfer.back.moves == tuple(zip(*transfer.moves, strict=True))
            assert transfer.is_local == (transfer.num_moved == 0)


@given(chains())
def test_a_hop_of_a_chain_moves_the_fewest_rows_that_equal_parts_need(
    chain: tuple[tuple[int, ...], list[tuple[int, ...]]],
):
    held, every = chain
    before = RowLayout.home(held)
    for members in every:
        after = before.onto(members)
        assert Transfer(before, after).num_moved == sum(
            max(0, n - own) for own, n in zip(before.sizes, after.sizes, strict=True)
        )
        assert after.sizes == RowRouting(held=before.sizes, members=members).parts
        before = after


@given(chains())
def test_rows_from_home_go_as_they_do_without_straight_ways(chain: tuple[tuple[int, ...], list[tuple[int, ...]]]):
    held, every = chain
    routing, home = RowRouting(held=held, members=every[0]), RowLayout.home(held)
    transfer = Transfer(home, home.onto(every[0]))
    assert transfer.moves == routing.moves
    for rank in range(len(held)):
        assert transfer.send_order(rank) is transfer.receive_order(rank) is None


@settings(max_examples=60)
@given(graphs())
def test_straight_ways_never_send_more_than_going_home(drawn: tuple[tuple[int, ...], dict[str, Stop]]):
    held, stops = drawn
    ways, home = Ways(stops), RowLayout.home(held)
    chosen = {name: ways.layout(name, held) for name in stops}

    def by_home(layouts: Mapping[str, RowLayout]) -> float:
        """Each straight result goes home first, and from there on."""
        hops = {name: Transfer(home, layout).num_moved for name, layout in layouts.items()}
        return sum(
            stop.home_bytes * hops[name] + sum(each * (hops[s] + hops[name]) for s, each in stop.sources.items())
            for name, stop in stops.items()
        )

    assert ways.cost(held, chosen) <= by_home({name: home.onto(stop.members) for name, stop in stops.items()})


@given(HELD.flatmap(lambda held: st.tuples(st.just(held), subsets(len(held)))))
def test_between_modules_on_the_same_ranks_nothing_travels(drawn: tuple[tuple[int, ...], tuple[int, ...]]):
    held, members = drawn
    first = Stop(members=members, home_bytes=1, given=frozenset({0}))
    ways = Ways({"a": first, "b": Stop(members=members, sources={"a": 1}, taken={0: "a"}, home_bytes=1)})
    assert ways.transfer("a", "b", held).is_local
