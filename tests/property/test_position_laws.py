"""The laws of the position stream: exact shares, spread evenly, and each pass over a source a permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.retrain.worker.positions import MAX_REPEATS, PositionStream, Source, samples_of

BOUNDED = settings(max_examples=40, deadline=None, derandomize=True)


def stream_of(*sizes: tuple[int, int], seed: int = 0) -> PositionStream:
    return PositionStream([Source(name=f"s{i}", rows=r, samples=n) for i, (r, n) in enumerate(sizes)], seed)


SIZES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 2000)), min_size=1, max_size=7)


@BOUNDED
@given(sizes=SIZES, seed=st.integers(0, 9))
def test_every_pass_has_each_row_once_and_samples_are_spread_evenly(sizes: list[tuple[int, int]], seed: int):
    stream = stream_of(*sizes, seed=seed)
    total = sum(samples for _, samples in sizes)
    assert len(stream.source) == len(stream.row) == total
    for index, (rows, samples) in enumerate(sizes):
        is_own = stream.source == index
        drawn = stream.row[is_own]
        assert len(drawn) == samples
        for first in range(0, samples, rows):
            part = drawn[first : first + rows]
            assert len(set(part.tolist())) == len(part)
            assert 0 <= part.min() <= part.max() < rows
        due = np.arange(1, total + 1) * samples / total
        assert (abs(np.cumsum(is_own) - due) <= len(sizes) + 1).all()


def test_the_stream_is_the_one_that_days_before_had():
    stream = stream_of((40, 700), (30, 300), seed=3)
    assert stream.source[500:510].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert stream.row[500:510].tolist() == [9, 22, 15, 3, 36, 5, 29, 39, 7, 12]
    assert (stream_of((40, 700), (30, 300), seed=4).row != stream.row).any()


ROWS = st.dictionaries(st.integers(0, 99).map("d{}".format), st.integers(0, 10**6), max_size=70)


@BOUNDED
@given(new=ROWS, replay=ROWS, share=st.sampled_from([0, 0.001, 0.3, 0.9]), total=st.integers(1, 10**6))
def test_rows_of_a_kind_come_equally_often(new: dict[str, int], replay: dict[str, int], share: float, total: int):
    new = {f"new/{name}": rows for name, rows in (new | {"d": 50}).items()}
    samples = samples_of(new, replay, share, total)
    assert sum(samples.values()) == total
    for folders in (new, replay):
        rows, drawn = sum(folders.values()), sum(samples[name] for name in folders)
        for name, count in folders.items():
            assert abs(samples[name] - drawn * count / max(1, rows)) < 1


def test_a_single_replayed_row_comes_only_so_many_times_as_often_as_a_new_row():
    samples = samples_of({"new": 1000}, {"old": 1}, 0.3, 10**6)
    assert samples["old"] / (samples["new"] / 1000) == pytest.approx(MAX_REPEATS, rel=0.01)
    assert samples_of({"new": 1000}, {"a": 300, "b": 900}, 0.3, 10**4) == {"new": 7000, "a": 750, "b": 2250}
