"""Measurements of SM partitioning on any backend: one file per question, and the table of questions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mosaic.microbench.interference import INTERFERENCE
from mosaic.microbench.isolation import ISOLATION
from mosaic.microbench.overlap import OVERLAP
from mosaic.microbench.pool import POOL
from mosaic.microbench.result import Question, Setup
from mosaic.microbench.scaling import SCALING
from mosaic.microbench.settings import BenchSettings, Budget

__all__ = ["QUESTIONS", "BenchSettings", "Budget", "Question", "Setup"]

QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {question.name: question for question in (POOL, SCALING, INTERFERENCE, ISOLATION, OVERLAP)}
)
"""Questions by name, in order of measurement."""
