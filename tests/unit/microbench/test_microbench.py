"""The questions of ``mosaic bench``, on the host and on streams without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mosaic.backends.host.backend import HostBackend, available_cores
from mosaic.microbench import QUESTIONS, BenchSettings, Budget, Question
from mosaic.microbench.interference import measure_interference
from mosaic.microbench.isolation import measure_isolation
from mosaic.microbench.overlap import VariantTime, gain_of, measure_overlap
from mosaic.microbench.result import Spread

TINY = BenchSettings.tiny()


@pytest.fixture(params=list(QUESTIONS))
def question(request: pytest.FixtureRequest) -> Question:
    return QUESTIONS[request.param]


def test_every_question_is_answered_on_the_host_and_its_file_is_read_back(question: Question, tmp_path: Path):
    result = question.measure(HostBackend(num_slots=2), TINY, None)
    written, picture = question.leave(result, tmp_path)
    assert json.loads(written.read_text())["origin"]["device"]["num_slots"] == result.origin.device.num_slots
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.origin.provenance.created
    assert result.origin.device.num_slots == 2
    assert any("say nothing about a GPU" in note for note in result.origin.notes)
    assert question.table(result).row_count > 0


class Pieces(Budget):
    """A budget of pieces in the place of seconds."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces

    def allows(self, piece: str, *, needs_s: float = 0.0) -> bool:
        self.pieces -= 1
        if self.pieces < 0:
            self._left_out.append(piece)
        return self.pieces >= 0


def test_a_budget_that_runs_out_leaves_a_valid_result_that_names_what_is_missing(question: Question, tmp_path: Path):
    result = question.measure(HostBackend(num_slots=2), TINY, Pieces(2))
    written, _ = question.leave(result, tmp_path)
    assert json.loads(written.read_text())["origin"]["device"]["num_slots"] == result.origin.device.num_slots
    assert result.left_out
    assert question.table(result).row_count > 0


def test_one_slot_is_too_few_for_two_partitions_and_that_is_said():
    backend = HostBackend(num_slots=1)
    assert "two partitions need two" in measure_interference(backend, TINY).absent[0].reason
    assert measure_isolation(backend, TINY).delays == ()
    overlap = measure_overlap(backend, TINY)
    assert {time.kind for time in overlap.times} == {"sequential"}
    assert any(absent.what == "partitions" for absent in overlap.absent)


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_host_partitions_run_on_cores_of_their_own():
    result = measure_isolation(HostBackend(), TINY)
    assert result.layouts
    for layout in result.layouts:
        assert layout.disjoint
        assert all(part.keeps_backward and len(part.units) == len(part.slots) for part in layout.partitions)


def step(kind: str, median: float, name: str = "") -> VariantTime:
    return VariantTime(
        variant=name or kind, kind=kind, quotas=None, passes="forward", launching="eager", step_ms=Spread.of([median])
    )


def test_a_gain_is_split_into_concurrency_and_quotas():
    times = [step("sequential", 12), step("plain", 8), step("partitions", 9, "a"), step("partitions", 6, "b")]
    gain = gain_of(times, "forward", "eager")
    assert gain is not None
    assert (gain.total, gain.concurrency, gain.best_partitions) == (2.0, 1.5, "b")
    assert gain.quotas == pytest.approx(8 / 6)
    assert gain_of(times, "forward", "captured") is None
    alone = gain_of([step("partitions", 5)], "forward", "eager")
    assert alone is not None
    assert (alone.total, alone.concurrency, alone.quotas) == (None, None, None)
