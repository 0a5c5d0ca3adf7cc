"""The page's first lines: the outcome, its reason, and the task of a person."""

from __future__ import annotations

from mosaic.retrain.page.markup import (
    MAX_SENTENCE,
    Markup,
    brief,
    element,
    facts,
    folded,
    join,
    section,
    shorten,
)
from mosaic.retrain.page.wording import count
from mosaic.retrain.records import HEADLINES, DayReport

MAX_MESSAGES = 8
MAX_MESSAGE = 300
"""Most bytes of a message on the page."""
MAX_DIGESTS = 16


def verdict(report: DayReport) -> Markup:
    """The head of the page."""
    reason = report.reason.strip()
    todo = report.todo.strip()
    messages = len(report.messages)
    return element(
        "header",
        element(
            "p",
            element("b", shorten(report.title)),
            " ",
            element("time", brief(report.day)),
            class_="faint",
        ),
        element("h1", HEADLINES[report.outcome], " ", element("small", _beside(report)), class_=report.outcome),
        element("p", shorten(reason, MAX_SENTENCE), class_="reason") if reason else None,
        element("p", element("b", "To do: "), shorten(todo, MAX_SENTENCE), class_="todo")
        if todo
        else element("p", "Nothing to do.", class_="faint"),
        element("p", element("a", count(messages, "message"), href="#messages"), class_="faint") if messages else None,
    )


def _beside(report: DayReport) -> str:
    """The versions and their outcome, in a few words."""
    new = _version(report.challenger, "the challenger")
    stays = f"{_version(report.champion)} stays" if report.champion else "there is no champion yet"
    return {
        "promoted": f"{new} is the champion now",
        "held": f"{stays}; a person said hold",
        "refused": f"{stays}; the gate refused {new}",
        "quarantined": f"{stays}; today's data was set aside",
        "failed": stays,
        "interrupted": f"{stays}; the next start goes on",
    }[report.outcome]


def _version(name: str | None, otherwise: str = "") -> str:
    return f"version {brief(name)}" if name else otherwise


def versions(report: DayReport) -> Markup:
    """The section on versions, the undo command, and digests."""
    shown = list(report.digests.items())[:MAX_DIGESTS]
    digests = facts((shorten(name), element("code", shorten(digest, 128))) for name, digest in shown)
    return section(
        "versions",
        "Versions",
        facts(
            (
                ("Champion", brief(report.champion or "none")),
                ("Challenger", brief(report.challenger or "none")),
                ("Anchor", brief(report.anchor or "none")),
                ("Undo", element("code", shorten(report.undo, MAX_SENTENCE)) if report.undo else None),
            )
        ),
        folded(f"{count(len(report.digests), 'digest')}", digests) if digests else None,
    )


def messages(report: DayReport) -> Markup:
    """The section of messages."""
    items = [element("li", shorten(message, MAX_MESSAGE)) for message in report.messages[:MAX_MESSAGES]]
    more = len(report.messages) - MAX_MESSAGES
    left_out = element("li", f"{more} more in report.json") if more > 0 else None
    return section("messages", "Messages", element("ul", join(items), left_out) if items else None)
