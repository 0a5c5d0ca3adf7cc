"""A day's report, computed from the day's files and rendered as one static page, at any time."""

from __future__ import annotations

import logging
import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment as Templates
from jinja2 import StrictUndefined, Template

from mosaic.artifact import load, save, steps_in, write_text
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.retrain import versions
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.folder import OUTCOMES, DayFolder, DayState, Folder, Outcome, load_if_intact
from mosaic.retrain.gate import Comparison, GateResult
from mosaic.retrain.records import Environment, Sources, StoredPlan, Trained

_LOG = logging.getLogger(__name__)
DAYS_SHOWN = 30
_MAX_MARGINS = 12.0
"""Margins that the picture of a comparison spans to either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    name: str
    """``new`` or ``replay``, with the day."""
    rows: int
    drawn: int
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DayReport:
    """``report.json``: the content of the page."""

    schema_version: int = 3
    title: str
    state: DayState
    todo: str
    gate: GateResult | None
    data_check: DataCheck | None
    data: tuple[SourceRows, ...]
    history: dict[str, Outcome]
    """Outcomes of the last thirty days, the oldest first."""
    environment: Environment | None
    plan: StoredPlan | None
    trained: Trained | None
    steps: int
    num_steps: int
    step_ms: float | None
    champion: str | None
    """Version in force now; None for none."""
    anchor: str | None
    digests: dict[str, str]
    """Digests by file: recipe, sources, plan, environment, model."""
    undo: str
    """Command that undoes today's promotion; empty without one."""
    scores: dict[str, float]
    """The challenger's mean value on each set, such as ``frozen``."""
    messages: tuple[str, ...]
    """Messages, such as failed hooks and checkpoints on a full disk."""

    @property
    def outcome(self) -> Outcome:
        return self.state.outcome or "interrupted"

    @property
    def reason(self) -> str:
        return self.state.reason or "It is still running."


def write_report(folder: Folder, day: DayFolder) -> None:
    """Writes ``report.json`` and ``report.html``; only logs a full disk, because the day itself is done."""
    try:
        report = report_of(folder, day)
        write_text(page_of(report), day.page)
        save(report, day.report)
    except MosaicError as error:
        _LOG.warning("the report of %s could not be written: %s", day.path.name, error)


def is_reported(day: DayFolder) -> bool:
    """Returns True if a day's report has its outcome; ``report.json`` is written last."""
    try:
        report = load(DayReport, day.report)
    except InvalidFileError:
        return False
    return report.state == day.state


def report_of(folder: Folder, day: DayFolder) -> DayReport:
    """Returns the current report of a day."""
    state, rows = day.state, steps_in(day.metrics)
    gate = load_if_intact(GateResult, day.gate)
    sources, trained = load_if_intact(Sources, day.sources), load_if_intact(Trained, day.trained)
    root = shlex.quote(str(folder.path.resolve()))
    champion = versions.linked(folder, "champion")
    days = [past for past in folder.days() if past.path.name <= state.day]
    outcome = state.outcome or "interrupted"
    can_undo = outcome == "promoted" and champion == state.version and versions.previous(folder) is not None
    version = versions.Version(folder.versions / (state.version or ""))
    times_ms = [row["ms"] for row in rows.values() if "ms" in row]
    digested = (day.recipe, day.sources, day.plan, day.environment, day.model)
    return DayReport(
        title=folder.path.resolve().name,
        state=state,
        todo=_todo(outcome, gate, state, root),
        gate=gate,
        data_check=load_if_intact(DataCheck, day.data_check),
        data=tuple(_data(sources, trained, max(rows, default=0))) if sources is not None else (),
        history={past.path.name: past.state.outcome or "interrupted" for past in days[-DAYS_SHOWN:]},
        environment=load_if_intact(Environment, day.environment),
        plan=load_if_intact(StoredPlan, day.plan),
        trained=trained,
        steps=max(rows, default=0),
        num_steps=sources.num_steps if sources is not None else 0,
        step_ms=statistics.median(times_ms) if times_ms else None,
        champion=champion,
        anchor=versions.linked(folder, "anchor"),
        digests={path.name: sha256_of(path) for path in digested if path.is_file()}
        | ({"parameters": trained.digest} if trained is not None else {}),
        undo=f"mosaic retrain rollback {root}" if can_undo else "",
        scores=version.card.values if (version.path / "card.json").is_file() else {},
        messages=(*state.messages, *(trained.notes.messages if trained is not None else ())),
    )


def _todo(outcome: Outcome, gate: GateResult | None, state: DayState, root: str) -> str:
    if outcome == "quarantined":
        dates = ", ".join(f"quarantine/{date}.json" for date in state.new)
        return f"Look at the day's data. If it is right after all, remove {dates}, and the next run trains on it."
    if outcome == "failed":
        begin_anew = f"To begin the day anew, move {root}/days/{state.day} away."
        return f"Mend what the sentence above says; the next run goes on from the last checkpoint. {begin_anew}"
    if outcome == "refused":
        by_hand = f"promote it by hand: mosaic retrain promote {root} {state.version}"
        return f"Look at the rows below. Mend the data or the model for the next day, or {by_hand}."
    if outcome == "held":
        return f"Promote it by hand if you want it: mosaic retrain promote {root} {state.version}."
    return gate.todo if gate is not None else ""


def _data(sources: Sources, trained: Trained | None, steps: int) -> Iterator[SourceRows]:
    rejected = trained.notes.rejects if trained is not None else {}
    for record, drawn in zip(sources.sources, sources.drawn(steps), strict=True):
        yield SourceRows(name=record.name, rows=record.rows, drawn=drawn, rejected=rejected.get(record.name, {}))


# The page.


def page_of(report: DayReport) -> str:
    """Returns the page of a day: self-contained HTML. Long texts are cut; ``report.json`` has them."""
    gate, trained = report.gate, report.trained
    comparisons = gate.comparisons if gate is not None else ()
    sets = [each for each in comparisons if each.name in ("frozen", "anchor", "fresh")]
    slices = sorted((each for each in comparisons if each not in sets), key=lambda each: (each.passed, each.name))
    margin = gate.margin if gate is not None else 0.01
    ends = [end for each in comparisons for end in (each.low, each.high, each.limit) if math.isfinite(end)]
    low = max(min((-margin, *ends)), -_MAX_MARGINS * margin)
    high = min(max((margin, *ends)), _MAX_MARGINS * margin)

    def place(difference: float) -> str:
        """Returns the place on the axis of all pictures, which holds zero, limits and intervals."""
        share = 0.06 + 0.88 * (difference - low) / (high - low) if math.isfinite(difference) else 0.0
        return f"{100 * min(1.0, max(0.0, share)):.4g}%"

    challenger = report.state.version if trained is not None else None
    new = f"version {challenger[:16]}" if challenger else "the challenger"
    stays = f"version {report.champion[:16]} stays" if report.champion else "there is no champion yet"
    page = _template().render(
        report=report,
        challenger=challenger,
        headline=OUTCOMES[report.outcome][0],
        beside=OUTCOMES[report.outcome][3].format(new=new, stays=stays),
        outcomes=OUTCOMES,
        gate=gate,
        sets=sets,
        slices=slices,
        place=place,
        places=min(6, max(0, 1 - math.floor(math.log10(margin)))) if 0 < margin < math.inf else 3,
        restarts=tuple(zip(report.state.starts, report.state.starts[1:], strict=False)),
        notes=trained.notes if trained is not None else None,
    )
    return page.encode("utf-8", "replace").decode()  # a name may have half a surrogate pair


@cache
def _template() -> Template:
    templates = Templates(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    templates.filters |= {
        "short": lambda text, limit=64: text if len(text) <= limit else text[:limit].rstrip() + "…",
        "count": lambda number, thing: f"{number:,} {thing}{'' if number == 1 else 's'}",
        "figure": lambda value: f"{value:.4g}".replace("-", "−"),
        "decimals": lambda value, places: f"{value:,.{places}f}".replace("-", "−"),
        "signed": lambda value, places: f"{value:+,.{places}f}".replace("-", "−"),
        "moment": lambda iso: f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M} UTC",
        "state": lambda each: "aside" if not each.counts and each.passed else "passed" if each.passed else "failed",
        "result": _result,
    }
    return templates.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))


def _result(each: Comparison) -> str:
    if not each.counts:
        return "○ shown only" if each.passed else "✕ worse; shown only"
    return "✓ passes" if each.passed else "✕ fails"
