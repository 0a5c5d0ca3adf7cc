"""What was tried before a plan was chosen: for ``describe()`` and ``metrics()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tried:
    """What is told of a trial, or of there having been none."""

    sentences: tuple[str, ...]
    """What was tried, measured and decided, and why."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``trials``, ``trial_steps``, ``trial_lost_ms`` and ``trial_ms/PLAN``, all measured."""
    ran: bool = False
    """Whether any plan was run."""
