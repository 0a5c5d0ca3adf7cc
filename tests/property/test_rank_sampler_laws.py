"""The laws of a sampler over ranks: every sample once an epoch, whoever loads it, and no more bytes than need be."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler

from mosaic.ranks import RankSampler, RowRouting
from mosaic.ranks.rows.sampler import Feed, rows_to_load

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)
SHARES = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


def batches(size: int, shares: list[int], epoch: int = 0, **options: object) -> list[list[list[int]]]:
    """Returns the batches of each rank."""
    samplers = [RankSampler(size, shares, rank, **options) for rank in range(len(shares))]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert len({len(sampler) for sampler in samplers}) == 1
    found = [list(sampler) for sampler in samplers]
    assert all(len(sampler) == len(rank) for sampler, rank in zip(samplers, found, strict=True))
    return found


@BOUNDED
@given(size=st.integers(0, 40), shares=SHARES, epoch=st.integers(0, 3), drop_last=st.booleans())
def test_every_sample_comes_once_an_epoch(size: int, shares: list[int], epoch: int, drop_last: bool):
    ranks = batches(size, shares, epoch, drop_last=drop_last)
    drawn = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert len(set(drawn)) == len(drawn)
    assert len(drawn) == (size - size % sum(shares) if drop_last else size)
    for together in zip(*ranks, strict=True):
        if sum(map(len, together)) == sum(shares):
            assert [len(part) for part in together] == shares


@BOUNDED
@given(size=st.integers(8, 40), shares=SHARES, done=st.integers(0, 3))
def test_going_on_gives_the_batches_that_were_left(size: int, shares: list[int], done: int):
    for rank in range(len(shares)):
        first = RankSampler(size, shares, rank, seed=5, drop_last=False)
        first.set_epoch(2)
        whole = list(first)
        second = RankSampler(size, shares, rank, drop_last=False)
        second.load_state_dict(first.state_dict(num_batches=min(done, len(whole))))
        assert len(second) == len(whole) - min(done, len(whole))
        assert list(second) == whole[done:]


def test_a_sampler_of_indices_and_a_plain_loader_go_with_it():
    sampler = RankSampler(SequentialSampler(range(10)), (1, 2), 1)
    loaded = [batch.tolist() for batch in DataLoader(list(range(100, 110)), batch_sampler=sampler)]
    assert loaded == [[101, 102], [104, 105], [107, 108]]
    assert sampler.weight == 4 / 3


MEMBERS = st.integers(2, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.tuples(st.sets(st.integers(0, size - 1), min_size=1), st.integers(1, 9)), min_size=1, max_size=4),
    )
)


@BOUNDED
@given(drawn=MEMBERS, rows=st.integers(4, 24), least=st.integers(0, 1))
def test_shares_of_the_sampler_never_send_more_than_equal_ones(
    drawn: tuple[int, list[tuple[set[int], int]]], rows: int, least: int
):
    size, modules = drawn
    feeds = [Feed(members=tuple(sorted(ranks)), step_bytes=weight) for ranks, weight in modules]

    def moved(held: tuple[int, ...]) -> float:
        return sum(feed.step_bytes * RowRouting(held=held, members=feed.members).num_moved for feed in feeds)

    shares = rows_to_load(rows, size, feeds, least=least)
    assert sum(shares) == rows
    assert min(shares) >= least
    assert moved(shares) <= moved(rows_to_load(rows, size, [], least=least))


def test_shares_and_ranks_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="some rank loads one"):
        RankSampler(10, (0, 0), 0)
    with pytest.raises(ValueError, match="rank=2"):
        RankSampler(10, (1, 1), 2)
    with pytest.raises(ValueError, match="num_rows=2"):
        rows_to_load(2, 3, [])
