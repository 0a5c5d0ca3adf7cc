"""The one rule on SMs that partitions were seen to share, on made-up records."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mosaic.backends.cuda.pool import PartitionRecord, find_shared_sms
from mosaic.errors import CudaError


def record(slots: Iterable[int], *more: int, probed: bool = True, missed: int = 0) -> PartitionRecord:
    """A partition of slots of 4 SMs that was also seen on ``more``, and not on the first ``missed`` of its own."""
    own = [4 * slot + sm for slot in slots for sm in range(4)]
    ids = tuple(sorted({*own[missed:], *more}))
    return PartitionRecord(
        slots=tuple(slots),
        requested_sms=len(own),
        granted_sms=len(own),
        sm_ids=ids if probed else None,
        creation_ms=1.0,
    )


def shared(*records: PartitionRecord, capability: str = "9.0") -> tuple[int, ...]:
    return find_shared_sms([records], compute_capability=capability, call="cuSplit")


@pytest.mark.parametrize(
    ("records", "sms"),
    [
        ([record([0]), record([1])], ()),
        ([record([0, 1]), record([1, 2])], ()),  # of two layouts, with a slot in common
        ([record([0], 40, 41), record([1], 40, 41), record([2], 40, 41)], (40, 41)),
        ([record([0], 4, 5), record([1])], (4, 5)),  # the two SMs are the other one's own
        ([record([0], 40, 41), record([1], probed=False)], ()),
    ],
)
def test_up_to_two_shared_sms_are_told_on_compute_capability_9(records: list[PartitionRecord], sms: tuple[int, ...]):
    assert shared(*records) == sms
    assert shared(*records, capability="9.1") == sms


@pytest.mark.parametrize(
    ("records", "capability", "words"),
    [
        ([record([0], 40), record([1], 40)], "8.0", r"slots \[0\] and .* slots \[1\] were seen to share SM 40 \(1 "),
        ([record([0], 40), record([1], 40)], "10.0", "share SM 40 "),
        ([record([0], 40, 41, 42), record([1], 40, 41, 42)], "9.0", r"SM 40, 41, 42 \(3 shared in all\)"),
        ([record([0], 4, 8), record([1], 9), record([2])], "9.0", r"slots \[1\] .* SM 4 \(3 shared in all\)"),
    ],
)
def test_more_than_that_is_an_error_that_names_the_first_pair(
    records: list[PartitionRecord], capability: str, words: str
):
    with pytest.raises(CudaError, match=words) as raised:
        shared(*records, capability=capability)
    assert (raised.value.call, raised.value.status) == ("cuSplit", "CUDA_SUCCESS")
