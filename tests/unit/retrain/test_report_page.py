"""A day's page keeps the names of users as text."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mosaic.pipelining.plan import PipelinePlan
from mosaic.plan import Plan
from mosaic.retrain.report import DayReport, page_of

HOSTILE = "\"'><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>&amp;\ud800{}"
DATES = {"day": "2026-11-22", "began": "2026-11-22T01:00:04Z", "at": "2026-11-22T01:44:12Z"}
DATES |= dict.fromkeys(("ended", "deadline"), "2026-11-22T05:30:00Z")


def filled(kind: Any, name: str = "") -> Any:
    """Returns a value of a type, with some of everything; all its texts but the dates are hostile."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind) if field.name != "schema_version"]
        return kind(**{name: filled(hints[name], name) for name in names})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is dict:
        return {filled(arguments[0]): filled(arguments[1])}
    if origin is tuple:
        return (filled(arguments[0]),)
    if origin is Literal:
        return arguments[0]
    if arguments:  # of a value or None
        return None if arguments[0] in (Plan, PipelinePlan) else filled(arguments[0], name)
    return {str: DATES.get(name, HOSTILE), int: 7, float: 0.5, bool: False}[kind]


def test_names_of_users_stay_text_and_slices_are_shown():
    page = page_of(filled(DayReport))
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;") > 10
    assert "<summary>1 slice</summary>" in page
    page.encode()
