"""The questions of ``mosaic bench``: on the host, and on streams of a runtime that finds races, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.host.backend import HostBackend
from mosaic.hardware.find import available_cores
from mosaic.microbench import QUESTIONS, BenchSettings, Budget, Question, Setup
from mosaic.microbench.overlap import gain_of
from mosaic.microbench.result import Result, Row
from mosaic.microbench.settings import Spread, measure_beside
from mosaic.profiler import Subject

TINY = BenchSettings.tiny()
OVERLAP_STEPS = [(f"{passes}, {launching}") for launching in ("eager", "captured")
                 for passes in ("forward+backward", "forward")]  # fmt: skip


def answer(name: str, backend: Backend, **more: Any) -> Result:
    return QUESTIONS[name].answer(Setup(backend=backend, settings=TINY, **more))


@pytest.fixture
def streams() -> Iterator[CudaBackend]:
    """Four slots on a fake runtime and a fake driver, to which all streams are given back."""
    driver = FakeGreenDriver(num_slots=4)
    backend = CudaBackend(api=FakeStreams(), driver=driver)
    with backend.api.watching():
        yield backend
    assert not driver.num_lent
    assert not backend.api.lent


@pytest.fixture(params=list(QUESTIONS))
def question(request: pytest.FixtureRequest) -> Question:
    return QUESTIONS[request.param]


@pytest.mark.parametrize("is_cut", [False, True])
def test_every_question_is_answered_on_the_host_and_leaves_its_files(question: Question, is_cut: bool, tmp_path: Path):
    budget = Budget(0) if is_cut else Budget()
    result = question.answer(Setup(backend=HostBackend(num_slots=2), settings=TINY, budget=budget))
    record, picture = question.write(result, tmp_path)
    assert json.loads(record.read_text())["device"]["num_slots"] == result.device.num_slots == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.provenance["created"]
    assert any("not representative of a GPU" in note for note in result.notes)
    assert bool(result.left_out) == is_cut == (question.table(result).row_count == 0)


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "pool"])  # whose contexts a driver makes
def test_every_question_is_answered_on_streams_without_a_race(name: str, streams: CudaBackend):
    assert QUESTIONS[name].table(answer(name, streams)).row_count > 0


def test_one_slot_is_too_few_for_two_partitions_and_the_result_says_so():
    backend = HostBackend(num_slots=1)
    assert "two partitions need two" in answer("interference", backend).of("absent")[0].note
    assert answer("isolation", backend).of("delays") == ()
    overlap = answer("overlap", backend)
    assert {row.labels["kind"] for row in overlap.of("times")} == {"sequential"}
    assert any(row.labels["subject"] == "partitions" for row in overlap.of("absent"))


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_host_partitions_run_on_cores_of_their_own():
    rows = answer("isolation", HostBackend()).of("partitions")
    assert rows
    for row in rows:
        assert row.values["num_shared"] == row.values["num_backward_outside"] == 0


def step(kind: str, median: float, name: str = "") -> Row:
    labels = {"variant": name or kind, "kind": kind, "passes": "forward", "launching": "eager"}
    return Row(of="times", labels=labels, values={"step_ms": Spread.of([median])})


def test_a_gain_is_split_into_concurrency_and_quotas():
    (gain,) = gain_of(
        [step("sequential", 12), step("plain", 8), step("partitions", 9, "a"), step("partitions", 6, "b")]
    )
    assert gain.values == {"total": 2.0, "concurrency": 1.5, "quotas": pytest.approx(8 / 6)}
    assert gain.labels["best_partitions"] == "b"
    assert gain_of([]) == []
    (alone,) = gain_of([step("partitions", 5)])
    assert set(alone.values.values()) == {None}


def test_overlap_compares_every_way_at_equal_work_and_splits_the_gain(streams: CudaBackend):
    result = answer("overlap", streams)
    assert {row.values["step_ms"].count for row in result.of("times")} == {TINY.rounds * TINY.steps_per_round}
    assert {stream.priority for stream in streams.api._streams.values()} == {0, -1}
    kinds = [row.labels["kind"] for row in result.of("times")]
    assert [kinds.count(kind) for kind in ("sequential", "plain", "prioritised")] == [4, 4, 4]
    assert kinds.count("partitions") >= 4
    for gain in result.of("gains"):
        assert gain.values["total"] == pytest.approx(gain.values["concurrency"] * gain.values["quotas"])
    assert any(launch.name == "graph replay" for launch in streams.api.launches)


class Fails(torch.nn.Linear):
    """Fails on partitions, as a library does that refuses them."""

    def __init__(self, backend: CudaBackend):
        super().__init__(4, 4)
        self.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.backend.api.current_stream().handle in FakeGreenDriver.HANDLES:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        return super().forward(x)


def test_an_error_of_one_variant_is_the_reason_of_its_own_rows_and_the_others_go_on(
    streams: CudaBackend, monkeypatch: pytest.MonkeyPatch
):
    batch = torch.ones(2, 4)
    modules = {"plain": torch.nn.Linear(4, 4), "failing": Fails(streams)}
    subjects = [Subject(name, own, (batch,), {}) for name, own in modules.items()]
    monkeypatch.setattr("mosaic.microbench.overlap.default_subjects", lambda scale, device: subjects)
    result = answer("overlap", streams)
    assert [row.labels["kind"] for row in result.of("times")] == ["sequential", "plain", "prioritised"] * 4
    failed = {row.labels["subject"]: row.note for row in result.of("absent")}
    failed = {subject: note for subject, note in failed.items() if subject.startswith("partitions")}
    assert [*failed] == [f"partitions 2+2, {step}" for step in OVERLAP_STEPS]
    assert all("CUDNN_STATUS_EXECUTION_FAILED" in note for note in failed.values())
    assert streams.api.current_stream() == streams.api.main


def test_launches_of_two_lanes_take_turns_so_that_both_run_at_once(streams: CudaBackend):
    order: list[str] = []
    with streams.open_lanes([(0,), (1,)]) as lanes:
        works = [(lanes.lane((slot,)), lambda name=name: order.append(name)) for slot, name in ((0, "a"), (1, "b"))]
        assert all(times.alone_ms for times in measure_beside(lanes, works, TINY, streams.torch_device))
    assert len(list(groupby(order))) > 6  # alone: one stretch of each; beside each other: pieces in turn
