"""What a day's training is told beside its data and its functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mosaic.train.loop import LoopSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How a model is divided over ranks by its layers."""

    memory_bytes: int
    """Of a rank's device; 0: what a GPU has, and no limit on CPUs."""
    said: str
    """All that it is planned for beside model and batch, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySettings:
    """All that is not data or function."""

    loop: LoopSettings
    """Of the loop."""
    num_steps: int
    """Steps of the day."""
    batch: int
    """Samples of a step, over all ranks."""
    micro_batches: int
    """Into how many the batch is cut."""
    workers: int
    """Processes that read samples, for this rank."""
    max_unreadable: float
    """Part of the samples that may draw an unreadable row."""
    exact: bool
    """Whether other numbers of ranks have to give the same bits."""
    exact_data: bool
    """Whether an iterable data set must be able to go on from a state."""
    colocate: bool
    """Whether Mosaic may run modules side by side."""
    exclude: tuple[str, ...]
    """Names or patterns of modules that are left where they are called."""
    pipeline: PipelineSettings | None
    """How the model is divided over the ranks by its layers; None where it is not."""
    start: Path | None
    """Checkpoints of the day that made the champion; None where there are none any more."""
    weights: Path | None
    """The champion's weights; None for new ones."""
    plan: Path
    """The day's ``plan.json``."""
    profile: Path
    """The day's ``profile.json``: what its plan was made from."""
    plan_before: Path | None
    """The one of the day before."""
    drift: str
    """Why the plan of the day before no longer fits, as its steps told; empty where it does."""
    modalities: str
    """What today's new rows have."""
    environment: Path
    """The day's ``environment.json``."""
    program: str
    """SHA-256 of the user's file."""
