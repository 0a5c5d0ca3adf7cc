"""The laws of the position stream: exact shares, each pass a permutation, and any position at once."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.retrain.worker.positions import (
    BLOCK,
    BLOCKS_IN_CYCLE,
    CYCLE,
    PositionStream,
    Source,
    mixed,
    permuted,
    shares_of,
)

BOUNDED = settings(max_examples=25, deadline=None, derandomize=True)


def stream_of(rows: list[int], shares: list[Fraction], seed: int = 0) -> PositionStream:
    pairs = enumerate(zip(rows, shares, strict=True))
    return PositionStream([Source(name=f"s{n}", rows=r, share=share) for n, (r, share) in pairs], seed)


@st.composite
def streams(draw: st.DrawFn) -> PositionStream:
    count = draw(st.integers(1, 7))
    cuts = sorted(draw(st.sets(st.integers(1, CYCLE - 1) | st.integers(1, 9), min_size=count - 1, max_size=count - 1)))
    units = [after - before for before, after in zip([0, *cuts], [*cuts, CYCLE], strict=True)]
    rows = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    return stream_of(rows, [Fraction(unit, CYCLE) for unit in units], draw(st.integers(0, 5)))


@BOUNDED
@given(stream=streams())
def test_shares_over_any_number_of_blocks_are_off_by_less_than_one_sample(stream: PositionStream):
    blocks = np.arange(BLOCKS_IN_CYCLE + 1)
    counts = np.array([stream.drawn(int(block) * BLOCK) for block in blocks])
    assert (np.diff(counts, axis=0) >= 0).all()
    assert (counts.sum(axis=1) == blocks * BLOCK).all()
    for source, of_source in zip(stream.sources, counts.T, strict=True):
        units = int(source.share * CYCLE)
        assert (abs(of_source * BLOCKS_IN_CYCLE - blocks * units) < BLOCKS_IN_CYCLE).all()
        assert of_source[-1] == units
        assert stream.drawn(3 * CYCLE + 5 * BLOCK)[int(source.name[1:])] == 3 * units + of_source[5]


@BOUNDED
@given(stream=streams(), first=st.integers(0, 3 * CYCLE), length=st.integers(1, 3 * BLOCK))
def test_spans_hold_what_stands_at_each_position_and_as_many_of_each_source(
    stream: PositionStream, first: int, length: int
):
    span = stream.span(first, first + length)
    assert len(span.sources) == len(span.rows) == len(span.passes) == length
    for offset in {0, length // 2, length - 1}:
        other = stream_of([s.rows for s in stream.sources], [s.share for s in stream.sources], stream.seed)
        alone = other.span(first + offset, first + offset + 1)
        for name in ("sources", "rows", "passes"):
            assert getattr(alone, name)[0] == getattr(span, name)[offset]
    count = np.bincount(span.sources, minlength=len(stream.sources))
    assert (np.subtract(stream.drawn(first + length), stream.drawn(first)) == count).all()


@BOUNDED
@given(rows=st.lists(st.integers(1, 1500), min_size=2, max_size=3), seed=st.integers(0, 9))
def test_each_pass_over_a_source_has_every_row_once_and_comes_after_the_one_before(rows: list[int], seed: int):
    shares = [Fraction(1, 2), *[Fraction(1, 2 * len(rows[1:]))] * len(rows[1:])]
    stream = stream_of(rows, shares, seed)
    span = stream.span(0, 6 * BLOCK)
    for source, size in enumerate(rows):
        mine = span.sources == source
        passes, taken = span.passes[mine], span.rows[mine]
        assert (np.diff(passes) >= 0).all()
        for number in range(int(passes[-1])):
            assert sorted(taken[passes == number].tolist()) == list(range(size))
        last = taken[passes == passes[-1]]
        assert len(set(last.tolist())) == len(last)


@BOUNDED
@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4), key=st.integers(0, 2**63))
def test_permutations_of_several_sizes_at_once_have_every_index_once(sizes: list[int], key: int):
    indices = np.concatenate([np.arange(size) for size in sizes]).astype(np.uint64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    keys = np.full(len(indices), key, dtype=np.uint64)
    found = permuted(indices, np.array(sizes, dtype=np.uint64)[owners], keys)
    for owner, size in enumerate(sizes):
        assert sorted(found[owners == owner].tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_rows_are_equally_likely(size: int):
    orders = math.factorial(size)
    keys = np.repeat(mixed(np.arange(200 * orders, dtype=np.uint64)), size)
    indices = np.tile(np.arange(size, dtype=np.uint64), 200 * orders)
    found = permuted(indices, np.full(len(keys), size, dtype=np.uint64), keys).reshape(-1, size)
    counts = Counter(map(tuple, found.tolist()))
    chi_square = sum((counts[order] - 200) ** 2 / 200 for order in counts)
    assert len(counts) == orders
    assert abs(chi_square - (orders - 1)) < 4 * math.sqrt(2 * orders)


ROWS = st.dictionaries(st.integers(0, 99).map("d{}".format), st.integers(0, 10**6), max_size=70)


@BOUNDED
@given(new=ROWS, replay=ROWS, share=st.sampled_from([0, 0.001, 0.3, 0.5, 0.9]))
def test_shares_of_folders_make_a_stream_and_leave_out_empty_ones(
    new: dict[str, int], replay: dict[str, int], share: float
):
    new = {f"new/{name}": rows for name, rows in (new | {"d": 50}).items()}
    shares = shares_of(new, replay, share)
    assert sum(shares.values()) == 1
    rows = new | replay
    assert set(shares) == {name for name, count in rows.items() if count and (name in new or share)}
    names = list(shares)
    span = stream_of([rows[name] for name in names], [shares[name] for name in names]).span(5, 6)
    assert span.sources[0] < len(names)
