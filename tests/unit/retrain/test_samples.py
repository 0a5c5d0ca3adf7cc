from __future__ import annotations

import pytest
import torch
from stream_data import ROWS, Rows, samples, stream

from mosaic.errors import MosaicError
from mosaic.retrain.worker.loader import MAX_ATTEMPTS, MIN_JUDGED, Reject, RejectCount, Samples

FIRST = 200
UNREADABLE = {"new": {row: ValueError(f"no image in {row}.png") for row in range(0, 70, 3)}}


def named(row: int) -> str:
    return list(ROWS)[row // 1000]


def test_positions_have_the_rows_of_the_stream():
    drawn = samples().__getitems__(range(FIRST))
    span = stream().span(0, FIRST)
    rows = [1000 * source + row for source, row in zip(span.sources, span.rows, strict=True)]
    assert [sample[0] for sample in drawn.samples] == rows
    assert drawn.rejects == ()


def test_a_row_is_augmented_otherwise_when_it_comes_again_and_under_another_seed():
    drawn = samples().__getitems__(range(1000)).samples
    noise = {tuple(noise.tolist()) for _, noise in drawn}
    assert len(noise) == 1000
    assert len({row for row, _ in drawn}) == sum(ROWS.values())
    values = torch.stack([noise for _, noise in drawn])
    assert len(values.unique()) == values.numel()


def test_unreadable_rows_give_way_to_others_of_their_source_and_are_named():
    drawn, plain = samples(bad=UNREADABLE).__getitems__(range(FIRST)), samples().__getitems__(range(FIRST))
    rejected = {reject.position for reject in drawn.rejects}
    assert rejected
    for position, (one, other) in enumerate(zip(drawn.samples, plain.samples, strict=True)):
        assert (one[0] != other[0]) == (position in rejected)
        assert named(one[0]) == named(other[0])
    first = drawn.rejects[0]
    assert first.reason == "ValueError"
    assert first.detail == f"no image in {first.row}.png"
    assert plain.samples[first.position][0] == first.row
    again = [samples(bad=UNREADABLE).__getitems__(range(half, half + 100)) for half in (0, 100)]
    assert [sample[0] for part in again for sample in part.samples] == [sample[0] for sample in drawn.samples]
    assert again[0].rejects + again[1].rejects == drawn.rejects


def test_a_source_without_any_readable_row_is_an_error_that_names_it():
    bad = {"older": {row: ValueError("torn") for row in range(ROWS["older"])}}
    with pytest.raises(MosaicError, match=rf"'older' in {MAX_ATTEMPTS + 1} attempts.* row \d+: ValueError: torn"):
        samples(bad=bad).__getitems__(range(FIRST))


def test_what_a_disk_answers_at_the_second_time_is_no_unreadable_row():
    class Flaky(Rows):
        def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
            found = super().__getitem__(row)
            if self.asked % 2:
                raise OSError("input/output error")
            return found

    flaky = Samples([Flaky(name) for name in ROWS], stream()).__getitems__(range(20))
    assert flaky.rejects == ()
    for one, other in zip(flaky.samples, samples().__getitems__(range(20)).samples, strict=True):
        assert torch.equal(one[1], other[1])


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
