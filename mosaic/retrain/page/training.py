"""The day's run: its window, its restarts, its bits against an undisturbed run, and its plan."""

from __future__ import annotations

from collections.abc import Sequence

from mosaic.retrain.page.markup import MAX_SENTENCE, Markup, element, facts, folded, join, section, shorten
from mosaic.retrain.page.wording import count, date_of, duration, figure, moment
from mosaic.retrain.records import DayReport, Restart, RunFacts

MAX_RESTARTS = 8
"""Most restarts on the page, the last ones."""
MAX_OPEN_RESTARTS = 3
"""Restarts shown unfolded."""
_MAX_PLAN = 1000


def training(report: DayReport) -> Markup:
    """The section on the training."""
    run = report.run
    if run is None:
        return section("run", "Run", element("p", "Nothing was trained.", class_="faint"))
    pairs = (
        ("Window", _window(run)),
        ("Steps", f"{run.steps:,} of {run.planned_steps:,}"),
        ("Ran on", f"{shorten(run.device)}, {count(run.num_ranks, 'process')}"),
        ("Bits", _bits(run)),
        ("Restarts", _restarts(run.restarts, date_of(run.began))),
        ("Plan", element("span", shorten(run.plan.strip(), _MAX_PLAN), class_="plan") if run.plan.strip() else None),
        ("Speed", _speed(run)),
        ("Planned anew", shorten(run.replanned, MAX_SENTENCE)),
        ("Started from", shorten(run.loaded, MAX_SENTENCE)),
    )
    return section("run", "Run", facts(pairs))


def _window(run: RunFacts) -> str:
    day = date_of(run.began)
    took = duration(run.began, run.ended)
    text = f"{moment(run.began)} to {moment(run.ended, day=day)}"
    text += f", {took}" if took else ""
    return text + (f"; it had until {moment(run.until, day=day)}" if run.until else "")


def _bits(run: RunFacts) -> Markup:
    if run.identical:
        return join(("✓ Bit-identical to an undisturbed run",))
    since = "" if run.differs_from_step is None else f" from step {run.differs_from_step:,}"
    because = f": {shorten(run.differs_because, MAX_SENTENCE)}" if run.differs_because else ""
    return element("span", f"≠ May differ from an undisturbed run{since}{because}", class_="notable")


def _restarts(restarts: Sequence[Restart], day: str) -> Markup:
    if not restarts:
        return join(("none",))
    items = [
        element(
            "li",
            f"{moment(restart.at, day=day)}: {shorten(restart.cause, 120)}, went on from step {restart.from_step:,}",
        )
        for restart in restarts[-MAX_RESTARTS:]
    ]
    if len(items) <= MAX_OPEN_RESTARTS:
        return element("ol", *items, class_="plain")
    more = len(restarts) - len(items)
    before = element("li", f"{more} earlier ones in report.json") if more else None
    summary = f"{len(restarts)}, the last {moment(restarts[-1].at, day=day)}: {shorten(restarts[-1].cause)}"
    return folded(summary, element("ol", before, *items, class_="plain"))


def _speed(run: RunFacts) -> str:
    step = "" if run.step_ms is None else f"{figure(run.step_ms)} ms a step"
    if run.speedup is None:
        return step
    gain = f"{run.speedup:.2f}× the plain loop, measured when the plan was chosen"
    return f"{gain}; {step}" if step else gain
