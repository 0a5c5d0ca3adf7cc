"""Measurements of SM partitioning on any backend, one file per question.

Each question is a function ``measure_...(backend, settings, budget)``. Its result is a frozen dataclass for JSON, a
table and a picture. Unavailable measurements are rows with a reason.
"""

from __future__ import annotations

from mosaic.microbench.questions import QUESTIONS, Question
from mosaic.microbench.settings import BenchSettings, Budget

__all__ = ["QUESTIONS", "BenchSettings", "Budget", "Question"]
