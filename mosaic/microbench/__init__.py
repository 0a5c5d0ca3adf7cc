"""Measurements of SM partitioning: one file a question, on any backend.

Each question is a function ``measure_...(backend, settings, budget)`` whose result is a frozen dataclass that goes to
JSON, to a table and to a picture. What cannot be had on a machine is a row with the reason.
"""

from __future__ import annotations

from mosaic.microbench.questions import QUESTIONS, Question
from mosaic.microbench.settings import BenchSettings, Budget

__all__ = ["QUESTIONS", "BenchSettings", "Budget", "Question"]
