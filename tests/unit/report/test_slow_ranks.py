"""The slow one of several ranks is named from their traces, and one that only waits is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mosaic.artifact import save
from mosaic.cli.main import run
from mosaic.errors import InvalidFileError
from mosaic.report.slow_ranks import compare_ranks
from mosaic.timeline import RankTrace, Span


def trace(rank: int, times_ms: dict[str, float], *, num_ranks: int = 2, run: str = "a", waits_ms: float = 0.0):
    """Three steps in which modules run one after the other; the first step takes ten times as long."""
    spans = []
    for step in range(3):
        for module, time_ms in [*times_ms.items(), ("", waits_ms)]:
            work = {"slots": (0,) if module else (), "module": module or "image", "phase": "forward"}
            spans.append(Span(**work, step=step, start_ms=0.0, end_ms=time_ms * (10 if step == 0 else 1)))
    return RankTrace(run=run, rank=rank, num_ranks=num_ranks, host=f"host{rank}", spans=tuple(spans))


def test_the_rank_whose_modules_take_longer_is_named_with_modules_and_times():
    comparison = compare_ranks([trace(1, {"image": 9.0, "text": 2.0}), trace(0, {"image": 5.0, "text": 2.0})])
    (slow,) = comparison.slow
    assert slow.rank == 1
    assert slow.lost_ms == pytest.approx(4.0)
    assert comparison.sentences() == (
        "rank 1 (host1) is slow, 4.00 ms per step: image forward 9.00 ms instead of 5.00 (1.8 times)",
    )


def test_a_rank_that_waits_is_not_slow():
    comparison = compare_ranks([trace(0, {"image": 5.0}, waits_ms=50.0), trace(1, {"image": 5.1})])
    assert comparison.slow == ()
    assert comparison.ranks[0].wait_ms == pytest.approx(50.0)
    assert "no rank is slow" in comparison.sentences()[0]


def test_a_rank_that_was_held_up_for_two_steps_of_five_is_not_slow():
    def steps(rank: int, times_ms: list[float]) -> RankTrace:
        spans = [
            replace(span, step=step, end_ms=time_ms)
            for step, time_ms in enumerate([1.0, *times_ms])
            for span in trace(rank, {"image": 1.0}).spans[:1]
        ]
        return replace(trace(rank, {"image": 1.0}), spans=tuple(spans))

    assert compare_ranks([steps(0, [5, 5, 9, 5, 9]), steps(1, [5, 5, 5, 5, 5])]).slow == ()
    # Each has a median above the other's typical step, in other steps: nothing that lasts.
    assert compare_ranks([steps(0, [7, 7, 7, 5, 5]), steps(1, [5, 5, 5, 7, 7])]).slow == ()
    (slow,) = compare_ranks([steps(0, [7, 7, 7, 7, 5]), steps(1, [5, 5, 5, 5, 7])]).slow
    assert slow.rank == 0


def test_traces_that_do_not_belong_together_are_refused():
    for traces, words in (([trace(0, {"a": 1.0})], "two or more"), ([trace(0, {}), trace(1, {}, run="b")], "runs")):
        with pytest.raises(InvalidFileError, match=words):
            compare_ranks(traces)


def test_the_doctor_names_the_slow_rank_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for rank, time_ms in enumerate((5.0, 9.0)):
        save(trace(rank, {"image": time_ms}), tmp_path / "in" / f"trace-rank{rank}.json")
    assert run(["doctor", "--trace", str(tmp_path / "in"), "--json", str(tmp_path / "slow.json")]) == 0
    assert "rank 1 (host1) is slow, 4.00 ms per step" in capsys.readouterr().out
    comparison = json.loads((tmp_path / "slow.json").read_text())
    assert [rank["rank"] for rank in comparison["ranks"] if rank["slow"]] == [1]
