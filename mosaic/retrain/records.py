"""What a day leaves for those who come in the morning: the gate's findings and the report, as JSON files hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

Outcome = Literal["promoted", "held", "refused", "quarantined", "failed", "interrupted"]
"""How a day ended. ``held``: it passed the gate while a person had said ``hold``; ``refused``: the gate said no;
``quarantined``: its data was not trained on; ``interrupted``: it is not finished and will go on."""

HEADLINES: dict[Outcome, str] = {
    "promoted": "PROMOTED",
    "held": "KEPT",
    "refused": "KEPT",
    "quarantined": "KEPT",
    "failed": "FAILED",
    "interrupted": "NOT FINISHED",
}
"""The one word that the page begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Challenger and another version on the same rows; larger values are better."""

    name: str
    """``frozen``, ``anchor``, ``fresh``, or a slice, such as ``site=north``. Where a gain on fresh rows bought a loss
    on old frozen rows, the others are ``frozen, recent rows`` and ``anchor, recent rows``."""
    against: str
    """The version compared with, such as ``0041``."""
    num_rows: int
    """Rows that both were scored on."""
    num_clusters: int
    """Groups of rows that were resampled together."""
    old: float
    """Mean value of the version compared with."""
    new: float
    """Mean value of the challenger."""
    difference: float
    """``new - old``."""
    low: float
    """Lower end of the interval of the difference, at the gate's confidence."""
    high: float
    """Upper end."""
    limit: float
    """The lower end has to be above this, a number below 0: the margin times what the set is allowed."""
    counts: bool
    """Whether the verdict depends on it; a slice with few rows is shown and does not count."""
    passed: bool
    """Whether the lower end is above the limit; a slice also passes if it is not worse beyond chance, by Holm's
    correction over all slices that count."""
    power: float | None = None
    """Chance that an equal model passes, as the rows have it; None where it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at beside the comparisons: validity, today's data."""

    name: str
    """Such as ``finite``, ``export``, ``size``, ``latency``, ``labels``, ``modalities``, ``champion's error``."""
    passed: bool
    """Whether it is as it has to be."""
    sentence: str
    """The value, the rule, and where it failed what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """``gate.json``: what the gate found and what it says."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    passes: bool
    """Whether the challenger may be promoted."""
    reason: str
    """Why, in one sentence."""
    todo: str
    """What a person must do; empty for nothing."""
    comparisons: tuple[Comparison, ...]
    """Frozen, anchor, fresh, slices."""
    findings: tuple[Finding, ...]
    """Validity and what else was checked."""
    margin: float
    """In units of the score."""
    confidence: float
    """One-sided, such as 0.95."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Rows that came from one source of a day, against what is usual."""

    name: str
    """``new`` or ``replay``, with the day."""
    rows: int
    """Rows that it has."""
    drawn: int
    """Samples that were drawn from it."""
    rejected: dict[str, int]
    """Rows that could not be read, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """A figure of today's data beside that of the days before."""

    name: str
    """Such as ``rows``, ``modality audio``, ``label 3``, ``mean image``."""
    today: float
    """Its value."""
    usual: float | None
    """Median of the days before; None where there are none."""
    low: float | None
    """Lowest that is not remarkable; None where there is no rule."""
    high: float | None
    """Highest that is not remarkable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A start of the day's training after the first."""

    at: str
    """UTC, ISO 8601."""
    cause: str
    """Such as ``killed (SIGKILL)``, ``window over``, ``SIGTERM``, ``new boot``."""
    from_step: int
    """The step that it went on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySquare:
    """A day of the last thirty."""

    day: str
    """Such as ``2026-11-22``."""
    outcome: Outcome | None
    """How it ended; None for no run."""
    fresh: float | None
    """The champion's mean value on the rows held out of that day; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """How the day's training ran."""

    began: str
    """UTC, ISO 8601."""
    ended: str
    """UTC, ISO 8601."""
    until: str | None
    """End of the window, UTC; None for none."""
    steps: int
    """Steps taken of those planned."""
    planned_steps: int
    """Steps of the whole day."""
    num_ranks: int
    """Processes that trained."""
    device: str
    """Name of the GPU, or of the host."""
    restarts: tuple[Restart, ...]
    """In order."""
    identical: bool
    """Whether the bits are those of an undisturbed run."""
    differs_from_step: int | None
    """Where not: the first step that may differ."""
    differs_because: str
    """Where not: why."""
    plan: str
    """The plan that ran, in a sentence or a few lines."""
    speedup: float | None
    """Measured, the plain loop's step over this one's, when the plan was chosen; None where nothing was tried."""
    step_ms: float | None
    """Median time of a step, in ms."""
    replanned: str
    """Why the day was planned anew; empty where the plan of the day before ran on."""
    loaded: str
    """What the model started from, and the names of what is new or gone in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayReport:
    """``report.json``: what the page says."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    title: str
    """Name of the recipe's folder."""
    day: str
    """Cut-off of the data."""
    outcome: Outcome
    """How it ended."""
    reason: str
    """Why, in one sentence."""
    todo: str
    """What a person must do; empty for nothing."""
    gate: GateResult | None
    """None where it did not come so far."""
    data_check: tuple[Finding, ...]
    """What was looked at before training."""
    data: tuple[SourceRows, ...]
    """By source."""
    usual: tuple[Usual, ...]
    """Figures of today's data."""
    history: tuple[DaySquare, ...]
    """The last thirty days, the oldest first."""
    run: RunFacts | None
    """None where nothing was trained."""
    champion: str | None
    """Version in force now; None for none."""
    challenger: str | None
    """Version that this day made."""
    anchor: str | None
    """Version that a person approved."""
    digests: dict[str, str]
    """Names of files and the digests of their content: recipe, sources, plan, environment, model."""
    undo: str
    """The command that takes today's promotion back; empty where there is none."""
    scores: dict[str, float] = field(default_factory=dict)
    """The challenger's mean value on each set, such as ``frozen``."""
    messages: tuple[str, ...] = ()
    """Hooks that failed, saves that found the disk full, and what else the morning should know."""
