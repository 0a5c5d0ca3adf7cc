"""Laws of masks in blocks and of who gets which: a dense matrix, a heap and all distributions are the judges."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mask_matrices import blocked, odd_mask

from mosaic import _search
from mosaic.context.distribute import CONTEXT_METHODS, distribute, sums_by_rank
from mosaic.context.plan import plan_context
from mosaic.context.tiles import MaskBlocks, Tiles
from mosaic.context.words import MaskWords, causal

WORKS = st.lists(st.integers(0, 10_000), min_size=8, max_size=60)


def matrix_of(tiles: Tiles, columns: int) -> np.ndarray:
    """0 for no tile, 1 for a part of one, 2 for a full one."""
    made = np.zeros((tiles.num_rows, columns), int)
    made[np.repeat(np.arange(tiles.num_rows), np.diff(tiles.offsets)), tiles.columns] = 1 + tiles.is_full
    return made


def check_blocks(mask: MaskWords, block: int) -> None:
    blocks, counted = MaskBlocks(mask=mask, block=block), blocked(mask, block)
    assert np.array_equal(blocks.work(), counted.sum(axis=1))
    expected = (counted > 0).astype(int) + (counted == block * block)
    rows = np.random.RandomState(0).permutation(blocks.num_blocks)
    tiles = blocks.tiles(rows)
    assert np.array_equal(matrix_of(tiles, blocks.num_blocks), expected[rows])
    assert all(np.all(np.diff(tiles.columns[a:b]) > 0) for a, b in zip(tiles.offsets, tiles.offsets[1:], strict=False))
    assert np.array_equal(blocks.tile_pairs(), (counted > 0).sum(axis=1) * block**2)
    assert np.array_equal(blocks.seen(rows[:3]), (counted[rows[:3]] > 0).any(axis=0))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    num_tokens=st.integers(1, 180),
    block=st.sampled_from([1, 3, 16, 64]),
    window=st.integers(1, 90),
)
def test_tiles_of_a_window_have_all_that_it_sees(seed: int, num_tokens: int, block: int, window: int):
    mask = odd_mask(seed, num_tokens)
    counted = blocked(mask, block, window)
    blocks = MaskBlocks(mask=mask, block=block, window=window)
    found = matrix_of(blocks.tiles(np.arange(blocks.num_blocks)), blocks.num_blocks)
    assert np.all(found[counted > 0])
    assert np.all(counted[found == 2] == block * block)
    plain = MaskBlocks(mask=causal(num_tokens), block=block, window=window)
    expected = blocked(plain.mask, block, window)
    found = matrix_of(plain.tiles(np.arange(plain.num_blocks)), plain.num_blocks)
    assert np.array_equal(found, (expected > 0).astype(int) + (expected == block * block))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31 - 1), num_tokens=st.integers(1, 180), block=st.sampled_from([1, 3, 16, 64]))
def test_work_and_tiles_are_those_of_the_dense_matrix(seed: int, num_tokens: int, block: int):
    check_blocks(odd_mask(seed, num_tokens), block)


@settings(deadline=None, max_examples=60)
@given(work=WORKS, ranks=st.integers(1, 8), seed=st.integers(0, 5), name=st.sampled_from(sorted(CONTEXT_METHODS)))
@example(work=[1] * 8, ranks=7, seed=0, name="headtail")  # fewer blocks than stretches
def test_every_method_gives_every_block_to_one_rank_and_every_rank_a_block(
    work: list[int], ranks: int, seed: int, name: str
):
    found = distribute(work, ranks, name, seed=seed)
    again = distribute(np.array(work), ranks, name, seed=seed)
    assert np.array_equal(found.rank_of, again.rank_of)
    counts = np.bincount(found.rank_of, minlength=ranks)
    assert sum(len(found.blocks_of(rank)) for rank in range(ranks)) == len(work)
    assert counts.max() == found.slots
    assert counts.max() <= -(-len(work) // ranks) + (name in ("headtail", "ring"))
    if name != "lpt":
        assert counts.min() >= 1


@settings(deadline=None, max_examples=60)
@given(work=WORKS, ranks=st.integers(1, 8))
def test_longest_first_is_a_heaps_and_within_its_bounds(work: list[int], ranks: int):
    heap = [(0, rank) for rank in range(ranks)]
    expected = np.zeros(len(work), int)
    for piece in sorted(range(len(work)), key=lambda piece: -work[piece]):
        total, rank = heapq.heappop(heap)
        expected[piece] = rank
        heapq.heappush(heap, (total + work[piece], rank))
    given = np.array(work)
    found = _search.longest_first(given, ranks=ranks, cap=len(work))
    assert np.array_equal(found, expected)
    assert sums_by_rank(given, found, ranks).max() <= sum(work) / ranks + max(work)


@settings(deadline=None, max_examples=60)
@given(work=WORKS, ranks=st.integers(1, 8))
def test_trades_never_add_to_the_rank_with_most_and_keep_counts(work: list[int], ranks: int):
    given = np.array(work)
    before = _search.longest_first(given, ranks=ranks, cap=-(-len(work) // ranks))
    after = distribute(given, ranks, "lpt", chunk=1)
    assert after.sums(given).max() <= sums_by_rank(given, before, ranks).max()
    assert np.array_equal(np.bincount(after.rank_of, minlength=ranks), np.bincount(before, minlength=ranks))
    left = sorted(after.sums(given))
    if left[-1] > np.ceil(given.sum() / ranks) * 1.0001:  # no single trade of the heaviest would have won anything
        assert not any_trade_wins(given, after.rank_of, ranks)


def any_trade_wins(work: np.ndarray, rank_of: np.ndarray, ranks: int) -> bool:
    sums = sums_by_rank(work, rank_of, ranks)
    heaviest = int(np.argmax(sums))
    mean = -(-int(work.sum()) // ranks)
    return any(
        sums[heaviest] > max(sums[heaviest] - work[i] + work[j], sums[rank_of[j]] + work[i] - work[j])
        for i in np.flatnonzero(rank_of == heaviest)
        for j in np.flatnonzero((rank_of != heaviest) & (sums[rank_of] < mean))
    )


@settings(deadline=None, max_examples=40)
@given(work=WORKS, ranks=st.integers(1, 8))
def test_coarse_chunks_cost_no_padding_and_little_balance(work: list[int], ranks: int):
    found, fine = distribute(work, ranks), distribute(work, ranks, chunk=1)
    assert found.slots == fine.slots
    if found.chunk > 1:
        assert found.imbalance(np.array(work)) <= 1.01
        assert all(len(set(found.rank_of[at : at + found.chunk])) == 1 for at in range(0, len(work), found.chunk))


@settings(deadline=None, max_examples=40)
@given(num_tokens=st.integers(8, 200), ranks=st.integers(1, 4), name=st.sampled_from(["lpt", "headtail", "ring"]))
def test_every_token_has_one_place_and_a_rank_has_its_tokens_in_order(num_tokens: int, ranks: int, name: str):
    plan = plan_context(odd_mask(num_tokens, num_tokens), ranks, block=2, method=name)
    orders = [plan.order_of(rank) for rank in range(ranks)]
    assert all(len(order) == plan.local_tokens for order in orders)
    assert all(np.all(np.diff(order[order >= 0]) > 0) for order in orders)
    order = np.concatenate(orders)
    assert sorted(order[order >= 0]) == list(range(num_tokens))
    places = plan.column_of()[np.arange(num_tokens) // 2] * 2 + np.arange(num_tokens) % 2
    assert np.array_equal(order[places], np.arange(num_tokens))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), num_tokens=st.integers(40, 160), ranks=st.integers(1, 4))
def test_a_plan_says_who_reads_whose_blocks(seed: int, num_tokens: int, ranks: int):
    mask = odd_mask(seed, num_tokens)
    plan = plan_context(mask, ranks, block=8)
    counted = blocked(mask, 8)
    needed = plan.needed()
    for rank in range(ranks):
        own = plan.distribution.blocks_of(rank)
        assert np.array_equal(needed[rank], (counted[own] > 0).any(axis=0))
        assert plan.pairs[rank] == counted[own].sum()
        remote = [block for block in np.flatnonzero(needed[rank]) if block not in own]
        assert plan.received_blocks(needed)[rank] == len(remote)
    assert plan.received_blocks(needed).max() <= plan.received_blocks()[0] == (ranks - 1) * plan.distribution.slots
