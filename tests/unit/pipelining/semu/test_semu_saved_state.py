"""Saved states of simulated nodes, joined and gone on from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.pipelining.semu.saved_state import Dependency, SavedState, resume, simulate_nodes


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[tuple[list[int], list[Dependency]]], list[Dependency]]:
    """Two or three graphs, and edges between all of their nodes, each from a lower number to a higher one."""
    graphs = []
    for _ in range(draw(st.integers(2, 3))):
        lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
        graphs.append((lengths, draw(edges(len(lengths)))))
    return graphs, draw(edges(sum(len(lengths) for lengths, _ in graphs)))


@st.composite
def edges(draw: st.DrawFn, count: int) -> list[Dependency]:
    found = []
    for _ in range(draw(st.integers(0, 6)) if count > 1 else 0):
        source = draw(st.integers(0, count - 2))
        target = draw(st.integers(source + 1, count - 1))
        found.append(Dependency(source=source, target=target, lag_ns=draw(st.integers(0, 5))))
    return found


@settings(max_examples=60)
@given(parts())
def test_joined_states_have_the_times_of_one_simulation(
    drawn: tuple[list[tuple[list[int], list[Dependency]]], list[Dependency]],
) -> None:
    graphs, new = drawn
    joined = resume([simulate_nodes(lengths, own) for lengths, own in graphs], new)
    whole: list[int] = []
    dependencies: list[Dependency] = []
    for lengths, own in graphs:
        base = len(whole)
        dependencies += [
            Dependency(source=one.source + base, target=one.target + base, lag_ns=one.lag_ns) for one in own
        ]
        whole += lengths
    at_once = simulate_nodes(whole, dependencies + new)
    assert (joined.start_ns, joined.makespan_ns) == (at_once.start_ns, at_once.makespan_ns)


def test_a_saved_state_stays_as_it_was_when_others_go_on_from_it() -> None:
    saved = simulate_nodes([3, 4], [Dependency(source=0, target=1)])
    later = resume((saved, saved), [Dependency(source=1, target=2, lag_ns=2)])
    assert later.start_ns == (0, 3, 9, 12)
    assert saved == SavedState(length_ns=(3, 4), dependencies=(Dependency(source=0, target=1),), start_ns=(0, 3))


def test_nodes_that_wait_for_each_other_are_refused() -> None:
    saved = simulate_nodes([3, 4], [Dependency(source=0, target=1)])
    with pytest.raises(ValueError, match="2 nodes wait for each other in a circle"):
        resume((saved,), [Dependency(source=1, target=0)])


def test_dependencies_out_of_range_and_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 nodes"):
        simulate_nodes([1], [Dependency(source=0, target=1)])
    with pytest.raises(ValueError, match="a lag is 0 or more"):
        simulate_nodes([1, 1], [Dependency(source=0, target=1, lag_ns=-1)])
    with pytest.raises(ValueError, match="takes -1 ns"):
        simulate_nodes([-1], [])
