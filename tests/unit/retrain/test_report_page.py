"""A day's page: what it shows of each report, and that names of users stay text."""

from __future__ import annotations

from dataclasses import replace

from mosaic.retrain.records import (
    Comparison,
    DayReport,
    DaySquare,
    Finding,
    GateResult,
    Outcome,
    Restart,
    RunFacts,
    SourceRows,
    Usual,
)
from mosaic.retrain.report import page_of

HOSTILE = "\"'><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>&amp;\ud800{}"


def comparison(name: str, difference: float, **changed: object) -> Comparison:
    base = Comparison(
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
    return replace(base, **changed)  # type: ignore[arg-type]


def report(outcome: Outcome = "promoted", text: str = "", **changed: object) -> DayReport:
    """A report with some of everything; ``text`` stands in the place of every text."""

    def words(plain: str) -> str:
        return text or plain

    finding = Finding(name=words("labels"), passed=False, sentence=words("a broken rule"))
    gate = GateResult(
        passes=True,
        reason="",
        todo="",
        comparisons=(
            comparison("frozen", 0.004),
            comparison("anchor", -0.3),
            *(comparison(f"{words('site')}={index:03}", 0.1 - index / 100) for index in range(12)),
        ),
        findings=(finding, replace(finding, passed=True)),
        margin=0.01,
        confidence=0.95,
    )
    usual = Usual(name=words("rows"), today=9.0, usual=5.0, low=4.0, high=6.0)
    run = RunFacts(
        began="2026-11-22T01:00:04Z",
        ended=words("2026-11-22T03:12:40Z"),
        until=None,
        steps=12000,
        planned_steps=12000,
        num_ranks=2,
        device=words("cpu"),
        restarts=(Restart(at="2026-11-22T01:44:12Z", cause=words("killed (SIGKILL)"), from_step=4100),),
        identical=False,
        differs_from_step=7,
        differs_because=words("there were 2 ranks and are 1"),
        plan=words("vision beside audio"),
        speedup=1.32,
        step_ms=48.13,
        replanned="",
        loaded=words("weights of the champion"),
    )
    days = tuple(DaySquare(day=f"2026-11-{day:02}", outcome="promoted", fresh=0.9) for day in range(1, 31))
    base = DayReport(
        title=words("shop"),
        day="2026-11-22",
        outcome=outcome,
        reason=words("0042 is as good as 0041."),
        todo=words("Approve an anchor."),
        gate=gate,
        data_check=(finding,),
        data=(SourceRows(name=words("new 2026-11-22"), rows=18240, drawn=4_300_800, rejected={words("torn"): 12}),),
        usual=(usual, replace(usual, today=5.0), replace(usual, usual=None, low=None, high=None)),
        history=days,
        run=run,
        champion="0042",
        challenger="0042",
        anchor=None,
        digests={words("recipe"): "9f86d081"},
        undo="mosaic retrain rollback shop",
        messages=(words("a hook failed"),),
    )
    return replace(base, **changed)  # type: ignore[arg-type]


def test_names_of_users_stay_text_and_the_page_asks_for_nothing():
    page = page_of(report(text=HOSTILE))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    page.encode()
