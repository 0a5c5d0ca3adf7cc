"""Tables, pictures and traces of profiles, plans and runs; and the progress line while they are made.

Neither ``rich`` nor ``matplotlib`` is imported before something is drawn with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic.report.plan_picture import draw_plan
    from mosaic.report.progress import Progress
    from mosaic.report.table import graph_table, plan_bars, plan_table, profile_table
    from mosaic.report.timeline import draw_timelines
    from mosaic.report.trace import chrome_trace, write_trace

_HOME = {
    "Progress": "mosaic.report.progress",
    "chrome_trace": "mosaic.report.trace",
    "draw_plan": "mosaic.report.plan_picture",
    "draw_timelines": "mosaic.report.timeline",
    "graph_table": "mosaic.report.table",
    "plan_bars": "mosaic.report.table",
    "plan_table": "mosaic.report.table",
    "profile_table": "mosaic.report.table",
    "write_trace": "mosaic.report.trace",
}

__all__ = [
    "Progress",
    "chrome_trace",
    "draw_plan",
    "draw_timelines",
    "graph_table",
    "plan_bars",
    "plan_table",
    "profile_table",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mosaic.report' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
