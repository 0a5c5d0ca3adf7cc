"""The page as a file."""

from __future__ import annotations

from pathlib import Path

from mosaic.artifact import write_text
from mosaic.retrain.page.data import data
from mosaic.retrain.page.days import days
from mosaic.retrain.page.intervals import comparisons
from mosaic.retrain.page.markup import Markup, brief, element, shorten
from mosaic.retrain.page.style import style_sheet
from mosaic.retrain.page.training import training
from mosaic.retrain.page.verdict import messages, verdict, versions
from mosaic.retrain.records import HEADLINES, DayReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The browser enforces a page without script and without requests."""


def page_of(report: DayReport) -> str:
    """Returns the page of a day: self-contained HTML under 100 KB for any report."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("link", rel="icon", href="data:,"),
        element("title", f"{HEADLINES[report.outcome]} · {brief(report.day)} · {shorten(report.title)}"),
        element("style", Markup(style_sheet())),
    )
    body = element(
        "body",
        element(
            "main",
            verdict(report),
            comparisons(report.gate, report.scores),
            days(report.history),
            data(report),
            training(report),
            versions(report),
            messages(report),
        ),
        element("footer", "report.json says the same."),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def write_page(report: DayReport, path: Path) -> None:
    """Writes the page to ``path`` atomically.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
    """
    write_text(page_of(report), path)
