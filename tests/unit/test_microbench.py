"""The questions of ``mosaic bench``, on the host and on streams without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic.artifact import load
from mosaic.backends.host import HostBackend
from mosaic.microbench import QUESTIONS, BenchSettings, Budget, Question

TINY = BenchSettings.tiny()


@pytest.fixture(params=list(QUESTIONS))
def question(request: pytest.FixtureRequest) -> Question:
    return QUESTIONS[request.param]


def test_every_question_is_answered_on_the_host_and_its_file_is_read_back(question: Question, tmp_path: Path):
    result = question.measure(HostBackend(num_slots=2), TINY, None)
    written, picture = question.leave(result, tmp_path)
    assert load(question.result, written) == result
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.origin.provenance.created
    assert result.origin.device.num_slots == 2
    assert any("say nothing about a GPU" in note for note in result.origin.notes)
    assert question.table(result).row_count > 0


def test_a_spent_budget_leaves_a_valid_result_that_names_what_is_missing(question: Question, tmp_path: Path):
    result = question.measure(HostBackend(num_slots=2), TINY, Budget(0))
    written, _ = question.leave(result, tmp_path)
    assert load(question.result, written) == result
    assert result.left_out
    question.table(result)
