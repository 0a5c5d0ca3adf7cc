"""No interleaving of ranks, loops and lanes blocks, in a model whose steps are the engine's own tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from ranks.interleavings import Case, Search

NOTHING: frozenset[int] = frozenset()
FREE = (NOTHING, NOTHING)
CHAIN = (NOTHING, frozenset({0}))
JOIN = (NOTHING, NOTHING, frozenset({0, 1}))
BOTH = frozenset({0, 1})


def subsets(num_ranks: int) -> list[frozenset[int]]:
    sizes = range(1, num_ranks + 1)
    return [frozenset(found) for size in sizes for found in itertools.combinations(range(num_ranks), size)]


def layouts(num_modules: int, num_ranks: int) -> Iterator[tuple[frozenset[int], ...]]:
    return itertools.product(subsets(num_ranks), repeat=num_modules)


@pytest.mark.parametrize("inputs", [FREE, CHAIN], ids=["side by side", "one after the other"])
@pytest.mark.parametrize("missing", [frozenset(), frozenset({(1, 0)})], ids=["all there", "one missing"])
def test_no_interleaving_of_two_modules_on_two_ranks_blocks(
    inputs: tuple[frozenset[int], ...], missing: frozenset[tuple[int, int]]
):
    for members in layouts(2, 2):
        case = Case(members, 2, inputs, missing)
        assert Search(case, everything=True).blocked is None, case


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_choice_of_who_holds_slots_blocks_three_modules(num_ranks: int):
    for index, members in enumerate(layouts(3, num_ranks)):
        missing = frozenset({(index % num_ranks, index % 3)}) if index % 2 else frozenset[tuple[int, int]]()
        joins = frozenset({index % num_ranks}) if index % 3 else NOTHING
        case = Case(members, num_ranks, JOIN, missing, joins=joins)
        assert Search(case, everything=False).blocked is None, case


FAULTS = {
    "slots held while waiting for messages": {"holds_slots": True},
    "one communicator for two modules": {"shared_communicator": True},
    "a rank that skips a call": {"skips": True, "missing": frozenset({(1, 0)})},
    "backwards in another order, each waited for": {"forward_backwards": frozenset({1}), "joins": BOTH},
}


@pytest.mark.parametrize("everything", [True, False], ids=["all interleavings", "choices that matter"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_block_is_found(fault: str, everything: bool):
    case = Case((BOTH, BOTH), 2, FREE, **FAULTS[fault])
    blocked = Search(case, everything=everything).blocked
    assert blocked is not None
    assert any("meet" in stuck for stuck in blocked), blocked


@pytest.mark.parametrize("members", [(BOTH, BOTH), (frozenset({0}), BOTH), (frozenset({0}), frozenset({1}))])
def test_leaving_out_orders_that_do_not_matter_finds_the_same(members: tuple[frozenset[int], ...]):
    for fault in ({}, *FAULTS.values()):
        case = Case(members, 2, FREE, **fault)
        full, reduced = Search(case, everything=True), Search(case, everything=False)
        assert (full.blocked is None) == (reduced.blocked is None), case
        assert reduced.num_states <= full.num_states
