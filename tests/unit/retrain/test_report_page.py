"""A day's page keeps the names of users as text."""

from __future__ import annotations

from dataclasses import replace

from mosaic.retrain.records import (
    Comparison,
    DayReport,
    DaySquare,
    Finding,
    GateResult,
    Restart,
    RunFacts,
    SourceRows,
    Usual,
)
from mosaic.retrain.report import page_of

HOSTILE = "\"'><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>&amp;\ud800{}"


def comparison(name: str, difference: float) -> Comparison:
    return Comparison(
        name=name,
        against="0041",
        num_rows=2000,
        num_clusters=140,
        old=0.912,
        new=0.912 + difference,
        difference=difference,
        low=difference - 0.006,
        high=difference + 0.006,
        limit=-0.01,
        counts="=" not in name,
        passed=difference - 0.006 > -0.01,
    )


def report(text: str) -> DayReport:
    """A report with some of everything; all its texts are the same."""
    finding = Finding(name=text, passed=False, sentence=text)
    gate = GateResult(
        passes=True,
        reason="",
        todo="",
        comparisons=(
            comparison("frozen", 0.004),
            comparison("anchor", -0.3),
            *(comparison(f"{text}={index:03}", 0.1 - index / 100) for index in range(12)),
        ),
        findings=(finding, replace(finding, passed=True)),
        margin=0.01,
        confidence=0.95,
    )
    usual = Usual(name=text, today=9.0, usual=5.0, low=4.0, high=6.0)
    run = RunFacts(
        began="2026-11-22T01:00:04Z",
        ended=text,
        until=None,
        steps=12000,
        planned_steps=12000,
        num_ranks=2,
        device=text,
        restarts=(Restart(at="2026-11-22T01:44:12Z", cause=text, from_step=4100),),
        identical=False,
        differs_from_step=7,
        differs_because=text,
        plan=text,
        speedup=1.32,
        step_ms=48.13,
        replanned="",
        loaded=text,
    )
    days = tuple(DaySquare(day=f"2026-11-{day:02}", outcome="promoted", fresh=0.9) for day in range(1, 31))
    return DayReport(
        title=text,
        day="2026-11-22",
        outcome="promoted",
        reason=text,
        todo=text,
        gate=gate,
        data_check=(finding,),
        data=(SourceRows(name=text, rows=18240, drawn=4_300_800, rejected={text: 12}),),
        usual=(usual, replace(usual, today=5.0), replace(usual, usual=None, low=None, high=None)),
        history=days,
        run=run,
        champion="0042",
        challenger="0042",
        anchor=None,
        digests={text: "9f86d081"},
        undo="mosaic retrain rollback shop",
        messages=(text,),
    )


def test_names_of_users_stay_text_and_the_page_asks_for_nothing():
    page = page_of(report(HOSTILE))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    page.encode()
