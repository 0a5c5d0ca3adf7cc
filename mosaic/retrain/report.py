"""A day's report, computed from the day's files and rendered as one static page, at any time."""

from __future__ import annotations

import logging
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import StrictUndefined, Template

from mosaic.artifact import load, save, write_text
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.lines import steps_in
from mosaic.retrain import versions
from mosaic.retrain.data_check import DataCheck, DayFigures
from mosaic.retrain.folder import DayFolder, DayState, Folder, load_of_earlier_day
from mosaic.retrain.records import (
    HEADLINES,
    Comparison,
    DayReport,
    DaySquare,
    Environment,
    GateResult,
    Outcome,
    Restart,
    RunFacts,
    SourceRows,
    StoredPlan,
    Trained,
    Usual,
)
from mosaic.retrain.worker.sources import Sources

_LOG = logging.getLogger(__name__)
DAYS_SHOWN = 30
"""Squares on the page."""
_MAX_MARGINS = 12.0
"""Margins that the picture of a comparison spans to either side."""
_OUTCOMES: dict[Outcome, tuple[str, str]] = {
    "promoted": ("P", "promoted"),
    "held": ("H", "held by a person"),
    "refused": ("R", "refused by the gate"),
    "quarantined": ("Q", "data quarantined"),
    "failed": ("F", "failed"),
    "interrupted": ("N", "not finished"),
}
"""Letter and words of each outcome."""


def write_report(folder: Folder, day: DayFolder) -> None:
    """Writes ``report.json`` and ``report.html``; only logs a full disk, because the day itself is done."""
    try:
        report = report_of(folder, day)
        write_page(report, day.page)
        save(report, day.report)
    except MosaicError as error:
        _LOG.warning("the report of %s could not be written: %s", day.path.name, error)


def is_reported(day: DayFolder) -> bool:
    """Returns True if a day's report has its outcome; ``report.json`` is written last."""
    try:
        report = load(DayReport, day.report)
    except InvalidFileError:
        return False
    return (report.outcome, report.reason) == (day.state.outcome, day.state.reason)


def find_day(folder: Folder, day: str | None) -> DayFolder:
    """Returns a day, the last one by default.

    Raises:
        MosaicError: No day exists, or none of that name.
    """
    days = folder.days()
    names = [each.path.name for each in days]
    if not days or (day is not None and day not in names):
        raise MosaicError(f"{folder.path} has no day {day or ''}; there are {', '.join(names[-8:]) or 'none yet'}")
    return days[-1] if day is None else days[names.index(day)]


def report_of(folder: Folder, day: DayFolder) -> DayReport:
    """Returns the current report of a day.

    Raises:
        MosaicError: A file of the day is damaged; names it.
    """
    state = day.state
    gate = load(GateResult, day.gate) if day.gate.is_file() else None
    check = load(DataCheck, day.data_check) if day.data_check.is_file() else None
    trained = load(Trained, day.trained) if day.trained.is_file() else None
    root = shlex.quote(str(folder.path.resolve()))
    champion = versions.linked(folder, "champion")
    outcome = state.outcome or "interrupted"
    can_undo = outcome == "promoted" and champion == state.version and versions.previous(folder) is not None
    version = versions.Version(folder.versions / (state.version or ""))
    return DayReport(
        title=folder.path.resolve().name,
        day=state.day,
        outcome=outcome,
        reason=state.reason or "It is still running.",
        todo=_todo(outcome, gate, state, root),
        gate=gate,
        data_check=check.findings if check is not None else (),
        data=tuple(_data(day, trained)),
        usual=check.usual if check is not None else (),
        history=tuple(_history(folder, state.day)),
        run=_run(day, state, trained),
        champion=champion,
        challenger=state.version if trained is not None else None,
        anchor=versions.linked(folder, "anchor"),
        digests=dict(_digests(day, trained)),
        undo=f"mosaic retrain rollback {root}" if can_undo else "",
        scores=version.card.values if (version.path / "card.json").is_file() else {},
        messages=(*state.messages, *(trained.notes.messages if trained is not None else ())),
    )


def _todo(outcome: Outcome, gate: GateResult | None, state: DayState, root: str) -> str:
    if outcome == "quarantined":
        dates = ", ".join(f"quarantine/{date}.json" for date in state.new)
        return f"Look at the day's data. If it is right after all, remove {dates}, and the next run trains on it."
    if outcome == "failed":
        return "Mend what the sentence above says; the next run goes on from the last checkpoint."
    if outcome == "held":
        return f"Promote it by hand if you want it: mosaic retrain promote {root} {state.version}."
    return gate.todo if gate is not None else ""


def _run(day: DayFolder, state: DayState, trained: Trained | None) -> RunFacts | None:
    if not (day.sources.is_file() and day.environment.is_file() and day.plan.is_file()):
        return None
    environment, plan = load(Environment, day.environment), load(StoredPlan, day.plan)
    rows = steps_in(day.metrics)
    times = [row["ms"] for row in rows.values() if "ms" in row]
    notes = trained.notes if trained is not None else None
    restarts = tuple(
        Restart(at=start.at, cause=before.ended, from_step=start.from_step)
        for before, start in zip(state.starts, state.starts[1:], strict=False)
    )
    return RunFacts(
        began=state.began,
        ended=state.ended or state.began,
        until=state.deadline,
        steps=max(rows, default=0),
        planned_steps=load(Sources, day.sources).num_steps,
        num_ranks=environment.num_ranks,
        device=environment.device if environment.device != "cpu" else environment.machine,
        restarts=restarts,
        identical=notes is None or notes.differs_from_step is None,
        differs_from_step=notes.differs_from_step if notes is not None else None,
        differs_because=notes.differs_because if notes is not None else "",
        plan=plan.said,
        speedup=plan.speedup,
        step_ms=statistics.median(times) if times else None,
        replanned=plan.why,
        loaded=notes.loaded if notes is not None else "",
    )


def _data(day: DayFolder, trained: Trained | None) -> Iterator[SourceRows]:
    if not day.sources.is_file():
        return
    sources = load(Sources, day.sources)
    drawn = sources.drawn(trained.step if trained is not None else 0)
    rejected = trained.notes.rejects if trained is not None else {}
    for record, count in zip(sources.sources, drawn, strict=True):
        yield SourceRows(name=record.name, rows=record.rows, drawn=count, rejected=rejected.get(record.name, {}))


def _history(folder: Folder, today: str) -> Iterator[DaySquare]:
    for day in [day for day in folder.days() if day.path.name <= today][-DAYS_SHOWN:]:
        fresh = None
        if (gate := load_of_earlier_day(GateResult, day.gate)) is not None:
            fresh = next((comparison.old for comparison in gate.comparisons if comparison.name == "fresh"), None)
        if fresh is None and (figures := load_of_earlier_day(DayFigures, day.figures)) is not None:
            fresh = figures.champion
        yield DaySquare(day=day.path.name, outcome=day.state.outcome or "interrupted", fresh=fresh)


def _digests(day: DayFolder, trained: Trained | None) -> Iterator[tuple[str, str]]:
    for path in (day.recipe, day.sources, day.plan, day.environment, day.model):
        if path.is_file():
            yield path.name, sha256_of(path)
    if trained is not None:
        yield "parameters", trained.digest


# The page.


def write_page(report: DayReport, path: Path) -> None:
    """Writes the page to ``path`` atomically.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
    """
    write_text(page_of(report), path)


def page_of(report: DayReport) -> str:
    """Returns the page of a day: self-contained HTML. Long texts are cut; ``report.json`` has them."""
    gate = report.gate
    comparisons = gate.comparisons if gate is not None else ()
    sets = [each for each in comparisons if each.name in ("frozen", "anchor", "fresh")]
    slices = sorted((each for each in comparisons if each not in sets), key=lambda each: (each.passed, each.name))
    margin = gate.margin if gate is not None else 0.01
    decimals = min(6, max(0, 1 - math.floor(math.log10(margin)))) if 0 < margin < math.inf else 3
    unusual = [each for each in report.usual if is_unusual(each)]
    page = _template().render(
        report=report,
        headline=HEADLINES[report.outcome],
        beside=_beside(report),
        outcomes=_OUTCOMES,
        gate=gate,
        sets=sets,
        slices=slices,
        place=_axis(margin, comparisons),
        places=decimals,
        chart=_chart(report.history),
        unusual=unusual,
        usual=[each for each in report.usual if each not in unusual],
        run=report.run,
    )
    return page.encode("utf-8", "replace").decode()  # a name may have half a surrogate pair


def is_unusual(figure: Usual) -> bool:
    below = figure.low is not None and not figure.today >= figure.low
    return below or (figure.high is not None and not figure.today <= figure.high)


@cache
def _template() -> Template:
    templates = Templates(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    templates.filters |= {
        "short": lambda text, limit=64: text if len(text) <= limit else text[:limit].rstrip() + "…",
        "count": lambda number, thing: f"{number:,} {thing}{'' if number == 1 else 's'}",
        "figure": figure_text,
        "decimals": lambda value, places: f"{value:,.{places}f}".replace("-", "−"),
        "signed": lambda value, places: f"{value:+,.{places}f}".replace("-", "−"),
        "moment": _moment,
        "unusual": is_unusual,
        "state": lambda each: "aside" if not each.counts and each.passed else "passed" if each.passed else "failed",
        "result": _result,
        "range": _range,
    }
    return templates.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))


def figure_text(value: float | None) -> str:
    """Returns a number of unknown size in about three digits, with a real minus sign."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN"
    if value == int(value) and abs(value) < 1e12:
        text = f"{value:,.0f}"
    elif -4 <= (size := math.floor(math.log10(abs(value)))) < 9:
        text = f"{value:,.{max(0, 2 - size)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.2e}"
    return text.replace("-", "−")


def _result(each: Comparison) -> str:
    if not each.counts:
        return "○ shown only" if each.passed else "✕ worse; shown only"
    return "✓ passes" if each.passed else "✕ fails"


def _beside(report: DayReport) -> str:
    """The versions and their outcome, in a few words."""
    new = f"version {report.challenger[:16]}" if report.challenger else "the challenger"
    stays = f"version {report.champion[:16]} stays" if report.champion else "there is no champion yet"
    return {
        "promoted": f"{new} is the champion now",
        "held": f"{stays}; promotions are on hold",
        "refused": f"{stays}; the gate refused {new}",
        "quarantined": f"{stays}; today's data was set aside",
        "failed": stays,
        "interrupted": f"{stays}; the next start goes on",
    }[report.outcome]


def _axis(margin: float, comparisons: Sequence[Comparison]) -> Callable[[float], str]:
    """Returns the place of a difference on the axis of all pictures, which holds zero, limits and intervals."""
    ends = [end for each in comparisons for end in (each.low, each.high, each.limit) if math.isfinite(end)]
    low = max(min((-margin, *ends)), -_MAX_MARGINS * margin)
    high = min(max((margin, *ends)), _MAX_MARGINS * margin)
    return partial(_percent, low=low, high=high)


def _range(figure: Usual) -> Callable[[float], str] | None:
    """Returns the place of a value in a figure's picture; None without a range."""
    values = (figure.today, figure.usual, figure.low, figure.high)
    ends = {value for value in values if value is not None and math.isfinite(value)}
    has_range = None not in (figure.low, figure.high, figure.usual) and len(ends) > 1
    return partial(_percent, low=min(ends), high=max(ends)) if has_range else None


def _percent(value: float, low: float, high: float) -> str:
    share = 0.06 + 0.88 * (value - low) / (high - low) if math.isfinite(value) else 0.0
    return f"{100 * min(1.0, max(0.0, share)):.4g}%"


def _moment(iso: str) -> str:
    try:
        when = datetime.fromisoformat(iso)
    except ValueError:
        return iso[:16]
    return f"{(when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _chart(history: Sequence[DaySquare]) -> list[dict[str, Any]]:
    """Places of the fresh scores; a line joins consecutive days, and a day without a score leaves a gap."""
    scores = [day.fresh if day.fresh is not None and math.isfinite(day.fresh) else None for day in history]
    values = [value for value in scores if value is not None]
    if len(values) < 2:
        return []
    low, span = min(values), max(values) - min(values)
    points: list[dict[str, Any]] = []
    for index, value in enumerate(scores):
        if value is not None:
            y = 84.0 - 72.0 * ((value - low) / span if span else 0.5)
            line = points[-1] if points and points[-1]["index"] == index - 1 else None
            x = f"{100 * (index + 0.5) / len(scores):.4g}%"
            points.append({"index": index, "value": value, "x": x, "y": f"{y:.4g}", "line": line})
    return points
