"""Reports of days as they may come: one of each outcome, the first, and one whose every name is hostile."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date, timedelta

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

HOSTILE = "\"'><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>&amp;\u202e\x00\ud800{}"
"""A name that a user may give a slice."""
_ENDS: list[Outcome | None] = [*["promoted"] * 11, "refused", *["promoted"] * 6, None, "quarantined", *["promoted"] * 4]  # type: ignore[list-item]
OUTCOMES: tuple[Outcome, ...] = ("promoted", "held", "refused", "quarantined", "failed", "interrupted")


def comparison(name: str, difference: float, **changed: object) -> Comparison:
    """A comparison on 2,000 rows with an interval of 0.006 to either side."""
    limit = -0.03 if "=" in name else -0.02 if name == "anchor" else -0.01
    one = Comparison(
        name=name,
        against="0012" if name == "anchor" else "0041",
        num_rows=2000,
        num_clusters=140,
        old=0.912,
        new=0.912 + difference,
        difference=difference,
        low=difference - 0.006,
        high=difference + 0.006,
        limit=limit,
        counts=True,
        passed=difference - 0.006 > limit,
        power=0.93,
    )
    return replace(one, **changed)  # type: ignore[arg-type]


def gate(*comparisons: Comparison, **changed: object) -> GateResult:
    """What the gate says to ``comparisons``."""
    found = GateResult(
        passes=all(one.passed for one in comparisons if one.counts),
        reason="The challenger is not worse than the champion.",
        todo="",
        comparisons=comparisons,
        findings=(
            Finding(name="finite", passed=True, sentence="All 2,140,160 weights are finite."),
            Finding(name="export", passed=True, sentence="The export reloads to equal outputs."),
            Finding(name="latency", passed=True, sentence="4.1 ms a batch of 1; the budget is 5 ms."),
        ),
        margin=0.01,
        confidence=0.95,
    )
    return replace(found, **changed)  # type: ignore[arg-type]


def history(outcome: Outcome, *, num_days: int = 30) -> tuple[DaySquare, ...]:
    """Days up to 2026-11-22, which ended as ``outcome``."""
    first = date(2026, 11, 22) - timedelta(days=num_days - 1)
    ends: list[Outcome | None] = [*(_ENDS * 2)[: num_days - 1], outcome]
    return tuple(
        DaySquare(
            day=str(first + timedelta(days=index)),
            outcome=end,
            fresh=None if end is None else 0.905 + 0.012 * math.sin(index / 3) - (0.02 if end == "refused" else 0),
        )
        for index, end in enumerate(ends)
    )


RUN = RunFacts(
    began="2026-11-22T01:00:04Z",
    ended="2026-11-22T03:12:40Z",
    until="2026-11-22T05:30:00Z",
    steps=12000,
    planned_steps=12000,
    num_ranks=1,
    device="NVIDIA H100 80GB HBM3",
    restarts=(Restart(at="2026-11-22T01:44:12Z", cause="killed (SIGKILL)", from_step=4100),),
    identical=True,
    differs_from_step=None,
    differs_because="",
    plan="stage 1: vision on 10 slots beside audio on 6 slots\nstage 2: fusion on 16 slots",
    speedup=1.32,
    step_ms=48.13,
    replanned="",
    loaded="weights of version 0041, all 214 tensors",
)

PROMOTED = DayReport(
    title="shop-assistant",
    day="2026-11-22",
    outcome="promoted",
    reason="Version 0042 is not worse than 0041 on 2,000 frozen rows (+0.004, from −0.002 to +0.010; margin 0.010).",
    todo="",
    gate=gate(
        comparison("frozen", 0.004),
        comparison("anchor", 0.011),
        comparison("fresh", 0.018, num_rows=640, low=0.002, high=0.034),
        comparison("site=north", 0.007, num_rows=810),
        comparison("site=south", -0.004, num_rows=790, low=-0.019, high=0.011),
        comparison("modality=audio", 0.001, num_rows=1200),
        comparison("site=harbour", -0.02, num_rows=60, counts=False, passed=False, low=-0.16, high=0.12),
    ),
    data_check=(
        Finding(name="champion's error", passed=True, sentence="0.091 on today's rows; usual is 0.088."),
        Finding(name="labels", passed=True, sentence="All shares are within their range."),
        Finding(name="modalities", passed=True, sentence="Both are there."),
    ),
    data=(
        SourceRows(name="new 2026-11-22", rows=18240, drawn=4_300_800, rejected={"truncated JPEG": 12, "no label": 3}),
        SourceRows(name="replay (30 days)", rows=412_000, drawn=1_843_200, rejected={}),
    ),
    usual=(
        Usual(name="rows", today=18240, usual=17950, low=9000, high=36000),
        Usual(name="modality audio", today=0.61, usual=0.6, low=0.45, high=0.75),
        Usual(name="label 3", today=0.104, usual=0.1, low=0.05, high=0.2),
        Usual(name="mean image", today=0.4471, usual=0.4502, low=0.41, high=0.49),
    ),
    history=history("promoted"),
    run=RUN,
    champion="0042",
    challenger="0042",
    anchor="0012",
    digests={name: f"{index:02d}" + "9f86d081884c7d65" * 3 for index, name in enumerate(("recipe", "sources", "plan"))},
    undo="mosaic retrain rollback /srv/shop-assistant",
)

HELD = replace(
    PROMOTED,
    outcome="held",
    reason="Version 0042 passed the gate; the file hold is there (since 2026-11-20).",
    todo="Look at version 0042 and promote it: mosaic retrain promote /srv/shop-assistant 0042",
    history=history("held"),
    champion="0041",
    undo="",
)

REFUSED = replace(
    PROMOTED,
    outcome="refused",
    reason="Version 0042 is worse than 0041 on the frozen rows: −0.081, and at most −0.010 is allowed.",
    todo="Look at the labels of 2026-11-22: this is the third refusal in a row, and the champion grows old.",
    gate=gate(
        comparison("frozen", -0.081),
        comparison("anchor", -0.31, low=-0.33, high=-0.29),
        comparison("fresh", 0.072, num_rows=640),
        *(comparison(f"site={index:02d}", (index - 20) / 500, num_rows=500 - 9 * index) for index in range(40)),
        passes=False,
        findings=(
            Finding(name="finite", passed=True, sentence="All weights are finite."),
            Finding(
                name="size", passed=False, sentence="The export has 124 MB; the budget is 100 MB. Raise gate.size."
            ),
        ),
    ),
    usual=(
        Usual(name="label 3", today=0.31, usual=0.1, low=0.05, high=0.2),
        *(Usual(name=f"label {index}", today=0.1, usual=0.1, low=0.05, high=0.2) for index in range(4, 14)),
        Usual(name="modality depth", today=0.2, usual=None, low=None, high=None),
    ),
    history=history("refused"),
    run=replace(
        RUN,
        identical=False,
        differs_from_step=8120,
        differs_because="it went on with 2 ranks where 4 had been",
        num_ranks=2,
        replanned="the number of ranks changed from 4 to 2; the profiles of vision and audio were kept",
        loaded="weights of version 0041; new: imu.encoder (12 tensors); gone: depth.encoder (9 tensors)",
        restarts=tuple(
            Restart(at=f"2026-11-22T02:{index:02d}:00Z", cause="SIGTERM", from_step=400 * index)
            for index in range(1, 12)
        ),
    ),
    champion="0041",
    undo="",
    messages=("The hook ./deploy.sh failed for version 0041 (exit 7); it is tried again tomorrow.",),
)

QUARANTINED = replace(
    PROMOTED,
    outcome="quarantined",
    reason="The champion errs on 48 % of today's rows; 9 % is usual and 18 % is allowed.",
    todo="Look at quarantine/2026-11-22; move it back to data/ if it is right, or delete it.",
    gate=None,
    data_check=(
        Finding(
            name="champion's error",
            passed=False,
            sentence="0.48 on today's rows; 0.18 is allowed. See whether labels or a sensor changed.",
        ),
        Finding(name="modalities", passed=True, sentence="Both are there."),
    ),
    history=history("quarantined"),
    run=None,
    champion="0041",
    challenger=None,
    undo="",
)

FAILED = replace(
    PROMOTED,
    outcome="failed",
    reason="train.py:make_model raised RuntimeError at step 0: mat1 and mat2 shapes differ (8x64, 32x10).",
    todo="Mend train.py, then start `mosaic retrain run /srv/shop-assistant` again.",
    gate=None,
    history=history("failed"),
    run=replace(RUN, steps=0, restarts=(), speedup=None, step_ms=None, plan=""),
    champion="0041",
    challenger=None,
    undo="",
)

INTERRUPTED = replace(
    FAILED,
    outcome="interrupted",
    reason="SIGTERM at step 8,120 of 12,000; the checkpoint is whole.",
    todo="",
    history=history("interrupted"),
    run=replace(RUN, steps=8120),
)

FIRST_DAY = replace(
    PROMOTED,
    reason="There was no champion; version 0001 is valid and becomes the first.",
    todo="Approve an anchor: mosaic retrain promote /srv/shop-assistant 0001",
    gate=gate(),
    usual=(Usual(name="rows", today=1797, usual=None, low=None, high=None),),
    data=(SourceRows(name="new 2026-11-22", rows=1797, drawn=61440, rejected={}),),
    history=(DaySquare(day="2026-11-22", outcome="promoted", fresh=0.871),),
    champion="0001",
    challenger="0001",
    anchor=None,
)

NOTHING = replace(FIRST_DAY, gate=None, data_check=(), data=(), usual=(), history=(), run=None, digests={}, undo="")

BY_NAME: dict[str, DayReport] = {
    "promoted": PROMOTED,
    "held": HELD,
    "refused": REFUSED,
    "quarantined": QUARANTINED,
    "failed": FAILED,
    "interrupted": INTERRUPTED,
    "first-day": FIRST_DAY,
    "nothing": NOTHING,
}


def hostile(*, letter: str = "", size: int = 5000, many: int = 200) -> DayReport:
    """A report whose every text is hostile, or ``size`` times ``letter``, with ``many`` of everything."""
    name = letter * size if letter else HOSTILE
    findings = tuple(Finding(name=name, passed=passed, sentence=name) for passed in (False, True)) * many
    low, high = math.nan, math.inf
    return DayReport(
        title=name,
        day=name,
        outcome="refused",
        reason=name,
        todo=name,
        gate=gate(
            comparison("frozen", math.nan, low=low, high=high, passed=False),
            *(comparison(f"{name}={index}", -0.5, against=name, passed=False) for index in range(many)),
            passes=False,
            findings=findings,
        ),
        data_check=findings,
        data=tuple(
            SourceRows(
                name=f"{name}{index}", rows=1, drawn=1, rejected={f"{name}{reason}": 1 for reason in range(many)}
            )
            for index in range(many)
        ),
        usual=tuple(Usual(name=f"{name}{index}", today=math.nan, usual=1, low=0, high=2) for index in range(many)),
        history=tuple(DaySquare(day=name, outcome="failed", fresh=1e300 * index) for index in range(many)),
        run=replace(
            RUN,
            began=name,
            ended=name,
            until=name,
            device=name,
            restarts=(Restart(at=name, cause=name, from_step=1),) * many,
            identical=False,
            differs_from_step=1,
            differs_because=name,
            plan=name,
            replanned=name,
            loaded=name,
        ),
        champion=name,
        challenger=name,
        anchor=name,
        digests={f"{name}{index}": name for index in range(many)},
        undo=name,
        messages=(name,) * many,
    )
