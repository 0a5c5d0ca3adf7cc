"""Measurements of SM partitioning on any backend, one file per question, and the table of questions.

Each question is a function ``measure_...(backend, settings, budget)``. Its result is a frozen dataclass for JSON, a
table and a picture. Unavailable measurements are rows with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mosaic.artifact import save
from mosaic.microbench.interference import measure_interference, report_interference
from mosaic.microbench.isolation import measure_isolation, report_isolation
from mosaic.microbench.overlap import measure_overlap, report_overlap
from mosaic.microbench.pool import measure_pool, report_pool
from mosaic.microbench.report import Report, draw, make_table
from mosaic.microbench.result import Result
from mosaic.microbench.scaling import measure_scaling, report_scaling
from mosaic.microbench.settings import BenchSettings, Budget

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["QUESTIONS", "BenchSettings", "Budget", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a device."""

    name: str
    """The sub-command of ``mosaic bench``."""
    asks: str
    """The question in words."""
    measure: Callable[..., Result]
    """Measures on a backend, by settings, within a time budget; ``left_out`` names the rest. Some questions take
    ``subjects``, modules of a user's model."""
    report: Callable[[Any], Report]
    """Content of a result's table and picture."""
    takes_subjects: bool = False
    """True if it measures a user's modules."""

    def table(self, result: Result) -> Table:
        """Returns the table of a result."""
        return make_table(result, self.report(result))

    def leave(self, result: Result, folder: Path) -> tuple[Path, ...]:
        """Writes ``NAME.json`` and ``NAME.png`` into a folder and returns their paths."""
        written, picture = folder / f"{self.name}.json", folder / f"{self.name}.png"
        save(result, written)
        draw(result, self.report(result).picture, picture)
        return written, picture


_ALL = (
    Question("pool", "what does creating a context and a stream cost, against lending one?", measure_pool, report_pool),
    Question("scaling", "how long does work take at every quota?", measure_scaling, report_scaling, True),
    Question("interference", "how much do two kernels side by side slow each other?", measure_interference,
             report_interference),
    Question("isolation", "which SMs does a partition use, and does a long kernel delay a short one next to it?",
             measure_isolation, report_isolation),
    Question("overlap", "which part of a gain comes from quotas, and which from concurrency alone?", measure_overlap,
             report_overlap, True),
)  # fmt: skip
QUESTIONS: Mapping[str, Question] = MappingProxyType({question.name: question for question in _ALL})
"""Questions by name, in the best order to measure."""
