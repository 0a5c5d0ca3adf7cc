"""The questions by name, each with its measurement, table, picture and kind of result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mosaic.artifact import save
from mosaic.backends.base import Backend
from mosaic.microbench.budget import Budget
from mosaic.microbench.interference import InterferenceResult, measure_interference
from mosaic.microbench.interference_report import draw_interference, table_interference
from mosaic.microbench.isolation import IsolationResult, measure_isolation
from mosaic.microbench.isolation_report import draw_isolation, table_isolation
from mosaic.microbench.overlap import measure_overlap
from mosaic.microbench.overlap_report import draw_overlap, table_overlap
from mosaic.microbench.overlap_result import OverlapResult
from mosaic.microbench.pool import PoolResult, measure_pool
from mosaic.microbench.pool_report import draw_pool, table_pool
from mosaic.microbench.result import Result
from mosaic.microbench.scaling import ScalingResult, measure_scaling
from mosaic.microbench.scaling_report import draw_scaling, table_scaling
from mosaic.microbench.settings import BenchSettings

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about a device."""

    name: str
    """The sub-command of ``mosaic bench``."""
    asks: str
    """The question in words."""
    result: type[Result]
    """Kind of result, for reading a file back."""
    measure: Callable[[Backend, BenchSettings, Budget | None], Result]
    """Measures; takes a backend, settings and a budget."""
    table: Callable[[Any], Table]
    """Makes the table of a result."""
    draw: Callable[[Any, Path], None]
    """Writes the picture of a result."""

    def leave(self, result: Result, folder: Path) -> tuple[Path, ...]:
        """Writes ``NAME.json`` and ``NAME.png`` into a folder and returns their paths."""
        written, picture = folder / f"{self.name}.json", folder / f"{self.name}.png"
        save(result, written)
        self.draw(result, picture)
        return written, picture


QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {
        question.name: question
        for question in (
            Question(
                name="pool",
                asks="what does making a context and a stream cost, against lending one?",
                result=PoolResult,
                measure=measure_pool,
                table=table_pool,
                draw=draw_pool,
            ),
            Question(
                name="scaling",
                asks="how much time does work take at every quota?",
                result=ScalingResult,
                measure=measure_scaling,
                table=table_scaling,
                draw=draw_scaling,
            ),
            Question(
                name="interference",
                asks="what do two kernels side by side cost each other?",
                result=InterferenceResult,
                measure=measure_interference,
                table=table_interference,
                draw=draw_interference,
            ),
            Question(
                name="isolation",
                asks="which SMs does a partition use, and does a long kernel delay a short one next to it?",
                result=IsolationResult,
                measure=measure_isolation,
                table=table_isolation,
                draw=draw_isolation,
            ),
            Question(
                name="overlap",
                asks="which part of a gain comes from quotas, and which from mere concurrency?",
                result=OverlapResult,
                measure=measure_overlap,
                table=table_overlap,
                draw=draw_overlap,
            ),
        )
    }
)
"""In the order in which they are best measured."""
