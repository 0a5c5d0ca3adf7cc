"""The budget of a day: batch, steps, ranks, window. The recipe's ``[budget]`` table, and the settings of the loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, ClassVar

from mosaic.artifact import Ge
from mosaic.device import FORBID_EXTRA

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The ``[budget]`` table of a recipe: what a day trains with."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    batch: Annotated[int, Ge(1)]
    """Samples of a step, over all ranks and micro-batches."""
    micro_batches: Annotated[int, Ge(1)] = 1
    """Micro-batches of a batch; a rank runs its share one after the other."""
    clip_norm: Annotated[float, Ge(0)] | None = None
    """Largest norm of the gradients; None for no limit."""
    passes: float = 1.0
    """Draws of each new row in a day; ``steps`` overrides it."""
    steps: Annotated[int, Ge(1)] | None = None
    """Steps of a day; None: as the passes need."""
    after: str | None = None
    """Earliest UTC time of day to start, such as ``01:00Z``; None: at any time until ``until``."""
    until: str | None = None
    """UTC time of day to release the device, such as ``05:30Z``; None: no limit."""
    judging: str = "10min"
    """Time before ``until`` for the comparison with the champion."""
    save: str = "5min"
    """Time between checkpoints."""
    keep: Annotated[int, Ge(1)] = 2
    """Checkpoints to keep."""
    workers: Annotated[int, Ge(0)] = 2
    """Processes that read samples, for each rank."""
    ranks: Annotated[int, Ge(1)] = 1
    """Processes that train, a device each; started by torchrun on this machine."""
    pipeline: bool = False
    """Divide the model's layers over the ranks, which train and score it in a pipeline of ``micro_batches``: for a
    model whose gradients and optimizer's state do not fit one device."""
    memory_gb: Annotated[float, Ge(0)] | None = None
    """Memory of a rank's device, with ``pipeline``; layers that do not fit are recomputed. None: all of a GPU's."""
    colocate: bool = True
    """Let Mosaic run the modules side by side."""
    exclude: tuple[str, ...] = ()
    """Names or patterns of modules that stay where they are called."""
    restarts: Annotated[int, Ge(0)] = 5
    """Most automatic restarts of a crashed training; two in a row without progress end the run."""
    fresh_start_every: Annotated[int, Ge(0)] = 0
    """Promoted days after which training starts from new weights; 0: always from the champion's."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of all random numbers."""

    def __post_init__(self) -> None:
        if not self.passes > 0:
            raise ValueError(f"passes={self.passes}; draw each row more than 0 times")
        if self.batch < max(self.micro_batches, self.ranks):
            raise ValueError(
                f"batch={self.batch} has less than a row for each of micro_batches={self.micro_batches} or "
                f"ranks={self.ranks}; take a larger batch, or fewer of them"
            )
        self._check_pipeline()
        if self.after is not None and self.until is None:
            raise ValueError(f"after={self.after!r} opens a window that nothing closes; set until, such as '05:30Z'")
        for name in ("save", "judging"):
            seconds_of(getattr(self, name), name)
        for name in ("after", "until"):
            if (value := getattr(self, name)) is not None:
                clock_time(value, name)

    def _check_pipeline(self) -> None:
        """Raises ValueError if keys do not fit ``pipeline``."""
        if not self.pipeline:
            if self.memory_gb is not None:
                raise ValueError(
                    f"memory_gb={self.memory_gb:g} is for a pipeline; set pipeline = true, or leave it out"
                )
            return
        if self.ranks == 1:
            raise ValueError("pipeline = true divides layers over ranks, and ranks=1; set it to the number of devices")
        if self.exclude:
            raise ValueError("exclude is for modules that run side by side; leave it out with pipeline = true")
        if self.micro_batches < self.ranks or self.batch % self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} pass through {self.ranks} ranks; take a number that is not less "
                f"and that divides batch={self.batch}, best {4 * self.ranks} or more"
            )

    @property
    def save_s(self) -> float:
        return seconds_of(self.save, "save")

    @property
    def judging_s(self) -> float:
        return seconds_of(self.judging, "judging")

    @property
    def memory_bytes(self) -> int:
        """Memory of a rank's device; 0: all of a GPU's, and no limit on CPUs."""
        return round((self.memory_gb or 0) * 1e9)

    @property
    def pipeline_settings(self) -> str:
        """All that the plan of a pipeline depends on beside model and batch, in words; empty without one."""
        memory = f", {self.memory_gb:g} GB a rank" if self.memory_gb is not None else ""
        return f"{self.micro_batches} micro-batches{memory}" if self.pipeline else ""

    def deadline(self, now: datetime) -> datetime | None:
        """Returns the time at which a run that begins now must release the device; None for none."""
        return None if self.until is None else _next(now, clock_time(self.until, "until"))

    def opens(self, now: datetime) -> datetime | None:
        """Returns the opening of the window; None if it is open."""
        if self.after is None or self.until is None:
            return None
        opening, closing = _next(now, clock_time(self.after, "after")), _next(now, clock_time(self.until, "until"))
        return opening if opening < closing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySettings:
    """The budget of a day, its data's limits, and its files."""

    budget: Budget
    num_steps: int
    """Steps of the day."""
    max_unreadable: float
    """Part of the samples that may draw an unreadable row."""
    exact_data: bool
    """Refuse an iterable data set without a state."""
    modalities: str
    """Modalities of today's new rows."""
    program: str
    """SHA-256 of the user's file."""
    until: float | None
    """Deadline on the clock of ``time.monotonic()``; None for none."""
    checkpoints: Path
    metrics: Path | None
    """``metrics.jsonl``; None on all ranks but the first."""
    environment: Path
    plan: Path
    profile: Path
    """The profile from which the plan was made."""
    plan_before: Path | None
    """The plan of the day before."""
    drift: str
    """Drift of the step time that the plan of the day before no longer fits; empty if it fits."""
    start: Path | None
    """Checkpoints of the champion's day; None if they are gone."""
    weights: Path | None
    """The champion's weights; None for new ones."""


def seconds_of(text: str, name: str) -> float:
    """Returns the seconds of a time such as ``90s``, ``5min`` or ``2h``.

    Raises:
        ValueError: The text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{name}={text!r} is no time above 0; write it as '90s', '5min' or '2h'")
    return float(match[1]) * _UNITS[match[2]]


def clock_time(text: str, name: str) -> time:
    """Returns a UTC time of day such as ``05:30Z``; local times occur twice or never in some nights.

    Raises:
        ValueError: The text has another form.
    """
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)Z", text)
    if match is None:
        raise ValueError(f"{name}={text!r} is no UTC time of day; write it as '05:30Z'")
    return time(int(match[1]), int(match[2]), tzinfo=UTC)


def _next(now: datetime, at: time) -> datetime:
    today = datetime.combine(now.astimezone(UTC).date(), at)
    return today if today > now else today + timedelta(days=1)
