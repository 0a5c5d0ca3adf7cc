from __future__ import annotations

import pytest
import torch
from stream_data import ROWS, Rows, samples, stream

from mosaic.errors import MosaicError
from mosaic.retrain.worker.loader import MAX_ATTEMPTS, MIN_JUDGED, Reject, RejectCount, Samples

FIRST = 200
UNREADABLE = {"new": {row: ValueError(f"no image in {row}.png") for row in range(0, 70, 3)}}


def test_positions_have_the_rows_of_the_stream():
    drawn, rejects = samples().__getitems__(range(FIRST))
    assert [row for row, _ in drawn] == (1000 * stream().source + stream().row)[:FIRST].tolist()
    assert rejects == ()


def test_a_row_is_augmented_otherwise_when_it_comes_again_and_under_another_seed():
    drawn, _ = samples().__getitems__(range(1000))
    noise = {tuple(noise.tolist()) for _, noise in drawn}
    assert len(noise) == 1000
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


def test_what_a_disk_answers_at_the_second_time_is_no_unreadable_row():
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


def reject(source: str, reason: str = "ValueError") -> Reject:
    return Reject(position=3, source=source, row=17, reason=reason, detail="no image in 17.png")


def test_more_rejects_than_the_limit_name_a_row_and_its_reason():
    count = RejectCount(limit=0.01)
    count.add([reject("new")] * (MIN_JUDGED // 100), 64)
    with pytest.raises(MosaicError, match=r"11 of 128 .*row 17 of 'new': ValueError: no image in 17\.png"):
        count.add([reject("new")], 64)
    patient = RejectCount(limit=0.01)
    patient.add([], 5000)
    patient.add([reject("new")] * 50, 0)
    with pytest.raises(MosaicError, match="51 of 5000"):
        patient.add([reject("new")], 0)
