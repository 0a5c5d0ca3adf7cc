"""A day's report, computed from the day's files; it can be written again at any time."""

from __future__ import annotations

import logging
import shlex
import statistics
from collections.abc import Iterator

from mosaic.artifact import load, save
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.lines import steps_in
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder, DayState, Folder, load_of_earlier_day
from mosaic.retrain.intake.data_check import DataCheck
from mosaic.retrain.intake.usual import DayFigures
from mosaic.retrain.page import write_page
from mosaic.retrain.records import DayReport, DaySquare, GateResult, Restart, RunFacts, SourceRows
from mosaic.train.data.sources import Sources
from mosaic.train.records import Environment, StoredPlan, Trained

_LOG = logging.getLogger(__name__)
DAYS_SHOWN = 30
"""Squares on the page."""


def write_report(folder: Folder, day: DayFolder) -> None:
    """Writes ``report.json`` and ``report.html``; only logs a full disk, because the day itself is done."""
    try:
        report = report_of(folder, day)
        write_page(report, day.page)
        save(report, day.report)
    except MosaicError as error:
        _LOG.warning("the report of %s could not be written: %s", day.path.name, error)


def is_told(day: DayFolder) -> bool:
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
    names = [day_folder.path.name for day_folder in days]
    if not days or (day is not None and day not in names):
        there = ", ".join(names[-8:]) or "none yet"
        raise MosaicError(f"{folder.path} has no day {day or ''}; there are {there}")
    return days[-1] if day is None else days[names.index(day)]


def report_of(folder: Folder, day: DayFolder) -> DayReport:
    """Returns the current report of a day.

    Raises:
        MosaicError: A file of the day is damaged; names it.
    """
    state = day.state
    gate = load(GateResult, day.gate) if day.gate.is_file() else None
    check = load(DataCheck, day.data_check) if day.data_check.is_file() else None
    run = _run(day, state)
    root = shlex.quote(str(folder.path.resolve()))
    champion = versions.linked(folder, "champion")
    outcome = state.outcome or "interrupted"
    trained = load(Trained, day.trained) if day.trained.is_file() else None
    can_undo = outcome == "promoted" and champion == state.version and versions.previous(folder) is not None
    version_folder = folder.versions / (state.version or "")
    card = versions.Version(version_folder).card if (version_folder / "card.json").is_file() else None
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
        run=run,
        champion=champion,
        challenger=state.version if day.trained.is_file() else None,
        anchor=versions.linked(folder, "anchor"),
        digests=dict(_digests(day)),
        undo=f"mosaic retrain rollback {root}" if can_undo else "",
        scores=card.values if card is not None else {},
        messages=(*state.messages, *(trained.notes.messages if trained is not None else ())),
    )


def _todo(outcome: str, gate: GateResult | None, state: DayState, root: str) -> str:
    if outcome == "quarantined":
        dates = ", ".join(f"quarantine/{date}.json" for date in state.new)
        return f"Look at the day's data. If it is right after all, remove {dates}, and the next run trains on it."
    if outcome == "failed":
        return "Mend what the sentence above says; the next run goes on from the last checkpoint."
    if outcome == "held":
        return f"Promote it by hand if you want it: mosaic retrain promote {root} {state.version}."
    return gate.todo if gate is not None else ""


def _run(day: DayFolder, state: DayState) -> RunFacts | None:
    if not (day.sources.is_file() and day.environment.is_file() and day.plan.is_file()):
        return None
    sources, environment = load(Sources, day.sources), load(Environment, day.environment)
    plan = load(StoredPlan, day.plan)
    trained = load(Trained, day.trained) if day.trained.is_file() else None
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
        planned_steps=sources.num_steps,
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
    days = [day for day in folder.days() if day.path.name <= today][-DAYS_SHOWN:]
    for day in days:
        fresh = None
        if (gate := load_of_earlier_day(GateResult, day.gate)) is not None:
            fresh = next((comparison.old for comparison in gate.comparisons if comparison.name == "fresh"), None)
        if fresh is None and (figures := load_of_earlier_day(DayFigures, day.figures)) is not None:
            fresh = figures.champion
        yield DaySquare(day=day.path.name, outcome=day.state.outcome or "interrupted", fresh=fresh)


def _digests(day: DayFolder) -> Iterator[tuple[str, str]]:
    for path in (day.recipe, day.sources, day.plan, day.environment, day.model):
        if path.is_file():
            yield path.name, sha256_of(path)
    if day.trained.is_file():
        yield "parameters", load(Trained, day.trained).digest
