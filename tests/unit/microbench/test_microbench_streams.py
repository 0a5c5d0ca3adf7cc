"""The questions on lanes that launch inline: streams of a runtime that finds races, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.device import Device
from mosaic.microbench import QUESTIONS, BenchSettings
from mosaic.microbench.isolation import measure_isolation
from mosaic.microbench.overlap import Overlap, Row, VariantTime, measure_overlap
from mosaic.microbench.result import NotMeasured
from mosaic.microbench.timing import time_beside
from mosaic.profiler import Subject

TINY = BenchSettings.tiny()


class StreamsBackend(Backend):
    """A backend of four slots whose lanes are streams of a fake runtime, plain ones included."""

    name = "streams"
    notes = ("a fake runtime: times mean nothing",)
    api = None  # its driver makes no contexts
    device = Device(name="fake streams", kind="cuda", num_slots=4, sms_per_slot=8)
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.runtime = FakeStreams()
        self.confined: set[int] = set()
        self.priorities: list[int] = []
        self.num_open = 0

    def open_lanes(self, partitions: Iterable[tuple[int, ...]]) -> StreamLanes:
        made = {part: (self.runtime.new_stream(), 8 * len(part)) for part in partitions}
        self.confined |= {stream.handle for stream, _ in made.values()}
        return self._open(made)

    def open_plain_lanes(
        self, partitions: Iterable[tuple[int, ...]], priorities: Sequence[int] | None = None
    ) -> StreamLanes:
        parts = list(partitions)
        self.priorities += priorities or []
        return self._open({part: (self.runtime.new_stream(), None) for part in parts})

    def _open(self, streams: dict[tuple[int, ...], tuple[object, int | None]]) -> StreamLanes:
        self.num_open += 1
        return StreamLanes(self.runtime, streams, self._closed)

    def _closed(self) -> None:
        self.num_open -= 1


@pytest.fixture
def backend():
    made = StreamsBackend()
    with made.runtime.watching():
        yield made
    assert made.num_open == 0


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_every_question_is_answered_on_streams_without_a_race(backend: StreamsBackend, name: str, tmp_path: Path):
    question = QUESTIONS[name]
    result = question.measure(backend, TINY, None)
    written, _ = question.leave(result, tmp_path)
    assert json.loads(written.read_text())["origin"]["device"]["num_slots"] == result.origin.device.num_slots
    assert question.table(result).row_count > 0


def test_the_cuda_backend_itself_answers_on_a_driver_in_process():
    backend = CudaBackend(api=FakeStreams(), driver=FakeGreenDriver(num_slots=4))
    with backend.api.watching():
        result = measure_isolation(backend, TINY)
    assert result.origin.backend == "cuda"
    assert result.layouts


def test_launches_of_two_lanes_take_turns_so_that_both_run_at_once(backend: StreamsBackend):
    order: list[str] = []
    with backend.open_lanes([(0,), (1,)]) as lanes:
        both = [(lanes.lane((slot,)), lambda name=name: order.append(name)) for slot, name in ((0, "a"), (1, "b"))]
        pieces = time_beside(lanes, both, [1.0, 1.0], TINY, backend.torch_device)
    assert all(found.all_ms for found in pieces)
    assert "".join(order).startswith("abab")


def test_overlap_compares_every_way_at_equal_work_and_splits_the_gain(backend: StreamsBackend):
    result = measure_overlap(backend, TINY)
    steps = TINY.rounds * TINY.steps_per_round
    assert {time.step_ms.count for time in result.times} == {steps}
    assert backend.priorities[:2] == [-1, 0]
    kinds = {(time.passes, time.launching): set() for time in result.times}
    for time in result.times:
        kinds[time.passes, time.launching].add(time.kind)
    assert len(kinds) == 4
    assert all(found == {"sequential", "plain", "prioritised", "partitions"} for found in kinds.values())
    assert any(absent.what == "torch contexts" for absent in result.absent)
    for gain in result.gains:
        assert gain.total == pytest.approx(gain.concurrency * gain.quotas)
    assert any(launch.name == "graph replay" for launch in backend.runtime.launches)


class Fails(torch.nn.Linear):
    """Fails where it is told to, as a library does that refuses a partition."""

    def __init__(self, backend: StreamsBackend, error: BaseException, *, first_call: int = 0, sticks: bool = False):
        super().__init__(4, 4)
        self.backend, self.error, self.first_call, self.sticks = backend, error, first_call, sticks
        self.calls = 0
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.backend.runtime.current_stream().handle in self.backend.confined:
            self.calls += 1
            self.broken |= self.calls > self.first_call
            if self.calls > self.first_call:
                raise self.error
        if self.broken and self.sticks:
            raise self.error
        return super().forward(x)


def rows_of(backend: StreamsBackend, failing: Fails) -> list[Row]:
    given = torch.ones(2, 4)
    subjects = (Subject("plain", torch.nn.Linear(4, 4), (given,), {}), Subject("failing", failing, (given,), {}))
    return list(Overlap(backend, TINY, None, subjects=subjects).rows())


def test_what_one_variant_raises_is_the_reason_of_its_own_rows_and_the_others_go_on(backend: StreamsBackend):
    rows = rows_of(backend, Fails(backend, RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")))
    times = [row for row in rows if isinstance(row, VariantTime)]
    assert [time.kind for time in times] == ["sequential", "plain", "prioritised"] * 4
    assert {time.step_ms.count for time in times} == {TINY.rounds * TINY.steps_per_round}
    failed = [row for row in rows if isinstance(row, NotMeasured) and row.what.startswith("partitions")]
    assert [row.what for row in failed] == [
        f"partitions 2+2, {passes}, {launching}"
        for launching in ("eager", "captured")
        for passes in ("forward+backward", "forward")
    ]
    assert all("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED" in row.reason for row in failed)
    assert backend.runtime.current_stream() == backend.runtime.main


def test_after_an_error_that_sticks_each_later_row_says_so_and_the_earlier_ones_stay(backend: StreamsBackend):
    rows = rows_of(backend, Fails(backend, RuntimeError("CUDA error: an illegal memory access"), sticks=True))
    assert [row for row in rows if isinstance(row, VariantTime)] == []  # all were open when it happened
    ways = ("partitions 2+2", "prioritised streams", "one after the other", "plain streams")
    for way in ways:
        reasons = [row.reason for row in rows if isinstance(row, NotMeasured) and row.what.startswith(f"{way}, ")]
        assert len(reasons) == 4
        assert all("illegal memory access" in reason for reason in reasons)
    late = StreamsBackend()
    with late.runtime.watching():
        rows = rows_of(
            late, Fails(late, RuntimeError("CUDA error: an illegal memory access"), first_call=5, sticks=True)
        )
    assert {row.kind for row in rows if isinstance(row, VariantTime)} == {
        "sequential",
        "plain",
        "partitions",
        "prioritised",
    }


def test_an_interrupt_ends_the_question_and_gives_the_lanes_back(backend: StreamsBackend):
    with pytest.raises(KeyboardInterrupt):
        rows_of(backend, Fails(backend, KeyboardInterrupt()))
    assert backend.num_open == 0
