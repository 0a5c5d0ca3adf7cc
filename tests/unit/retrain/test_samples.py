from __future__ import annotations

import numpy as np
import pytest
import torch
from stream_data import ROWS, Rows, samples, stream

from mosaic.errors import MosaicError
from mosaic.retrain.worker.data import held_out_rows
from mosaic.retrain.worker.loader import MAX_ATTEMPTS, MIN_JUDGED, Reject, RejectCount, Samples

FIRST = 200
UNREADABLE = {"new": {row: ValueError(f"no image in {row}.png") for row in range(0, 70, 3)}}


def test_positions_have_the_rows_of_the_stream():
    drawn, rejects = samples().__getitems__(range(FIRST))
    assert [row for row, _ in drawn] == (1000 * stream().source + stream().row)[:FIRST].tolist()
    assert rejects == ()


def test_a_row_is_augmented_otherwise_when_it_comes_again():
    drawn, _ = samples().__getitems__(range(1000))
    assert len({row for row, _ in drawn}) == sum(ROWS.values())
    values = torch.stack([noise for _, noise in drawn])
    assert len(values.unique()) == values.numel()


def test_unreadable_rows_give_way_to_others_of_their_source_and_are_named():
    (drawn, rejects), (plain, _) = (samples(bad=bad).__getitems__(range(FIRST)) for bad in (UNREADABLE, None))
    rejected = {reject.position for reject in rejects}
    assert rejected
    for position, ((row, _), (expected, _)) in enumerate(zip(drawn, plain, strict=True)):
        assert (row != expected) == (position in rejected)
        assert row // 1000 == expected // 1000
    first = rejects[0]
    assert (first.reason, first.detail) == ("ValueError", f"no image in {first.row}.png")
    assert plain[first.position][0] == first.row
    parts = [samples(bad=UNREADABLE).__getitems__(range(half, half + 100)) for half in (0, 100)]
    assert [row for part, _ in parts for row, _ in part] == [row for row, _ in drawn]
    assert parts[0][1] + parts[1][1] == rejects


def test_a_source_without_any_readable_row_is_an_error_that_names_it():
    bad = {"older": {row: ValueError("torn") for row in range(ROWS["older"])}}
    with pytest.raises(MosaicError, match=rf"'older' in {MAX_ATTEMPTS + 1} attempts.* row \d+: ValueError: torn"):
        samples(bad=bad).__getitems__(range(FIRST))


def test_a_row_that_a_disk_gives_at_the_second_time_is_not_unreadable():
    class Flaky(Rows):
        def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
            sample = super().__getitem__(row)
            if self.asked % 2:
                raise OSError("input/output error")
            return sample

    flaky, rejects = Samples([Flaky(name) for name in ROWS], stream()).__getitems__(range(20))
    assert rejects == ()
    for (_, noise), (_, expected) in zip(flaky, samples().__getitems__(range(20))[0], strict=True):
        assert torch.equal(noise, expected)


def test_more_rejects_than_the_limit_name_a_row_and_its_reason():
    reject = Reject(position=3, source="new", row=17, reason="ValueError", detail="no image in 17.png")
    count = RejectCount(limit=0.01)
    count.add([reject] * (MIN_JUDGED // 100), 64)
    with pytest.raises(MosaicError, match=r"11 of 128 .*row 17 of 'new': ValueError: no image in 17\.png"):
        count.add([reject], 64)


class Recordings(list[int]):
    """Ten rows of each recording."""

    def cluster(self, index: int) -> str:
        return f"recording {index // 10}"


def test_the_same_rows_are_held_out_at_each_start_and_clusters_whole():
    def out(rows: list[int], *, seed: int = 3, day: str = "2026-11-22") -> np.ndarray:
        return held_out_rows(rows, share=0.1, seed=seed, day=day)

    rows = list(range(10_000))
    assert (out(rows) == out(rows)).all()
    assert 0.08 < out(rows).mean() < 0.12
    for other in (out(rows, seed=4), out(rows, day="2026-11-23")):
        assert (other != out(rows)).any()
    recordings = out(Recordings(range(1000))).reshape(100, 10)
    assert 0 < recordings.any(1).sum() < 100
    assert (recordings.all(1) == recordings.any(1)).all()
