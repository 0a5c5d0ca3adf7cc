"""The computing and waiting of one of several ranks, as a file for ``mosaic doctor --trace``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mosaic.device import StrictFile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpan(StrictFile):
    """One piece of work, or one wait for other ranks."""

    kind: Literal["compute", "wait"]
    module: str
    """Module of the work."""
    phase: str
    """``forward``, ``backward``, ``reduce`` or ``agreement``."""
    step: int
    """Index of the training step, from 0."""
    start_us: float
    """Microseconds on a clock of the rank; work and waits may have different ones."""
    end_us: float

    def __post_init__(self) -> None:
        if not self.start_us <= self.end_us < float("inf"):
            raise ValueError(f"a span ends at {self.end_us} us, before its start at {self.start_us} us")

    @property
    def duration_ms(self) -> float:
        """Time from start to end."""
        return (self.end_us - self.start_us) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace(StrictFile):
    """Spans of one rank in some steps."""

    schema_version: int = 4
    run: str
    """Equal for all ranks of one start."""
    rank: int
    num_ranks: int
    """Number of ranks of the run."""
    host: str
    """Name of the rank's machine."""
    spans: tuple[RankSpan, ...]
