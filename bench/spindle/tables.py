"""The study's table for a page: what came out here, and what Spindle's text says of that figure."""

from __future__ import annotations

import re
from pathlib import Path

from bench.gpu.tables import number
from bench.pages import NOT_YET, SOURCES, newest_study, source_of, table

SHOWN = (
    r"Fig\. 8: (spindle|spindle-optimus|distmm-mt|distmm|exact|auto): highest speed-up over megatron, .*, any GPUs",
    r"Fig\. 8: spindle: (least speed-up over megatron|highest speed-up over distmm-mt), .*",
    r"Fig\. 12: (spindle|exact|auto): .*, 256 GPUs, s",
    r"Fig\. 13: .*: speed-up over megatron, .*",
    r"Fig\. 14: (spindle|distmm-mt|auto): .*",
    r"Fig\. 4: .*",
)
"""Whole names of figures, as regular expressions; the page of figures has the others."""


def spindle_table(results: Path) -> str:
    """Returns the table of the newest kept result; what could not be had stands with its reason."""
    newest = newest_study("bench_spindle", results)
    if newest is None:
        return NOT_YET
    rows = []
    for pattern in SHOWN:
        for figure in newest.figures:
            if re.fullmatch(pattern, figure.name):
                value = f"not yet: {figure.reason}" if figure.value is None else number(figure.value)
                cells = (value if figure.source == source else "" for source in SOURCES)
                rows.append((figure.name, *cells, figure.labels.get("paper", "")))
    return table((source_of(newest), *SOURCES, "the Spindle paper's text"), rows)
