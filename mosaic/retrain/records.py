"""The JSON files that a day's training writes: its data, its plan, its environment, and its end. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mosaic.plan import Plan

WINDOW_OVER = "window over"
"""End of a training whose device must be released."""
NEW_WEIGHTS = "new weights"
"""Start of a model without a champion."""


def differences(now: Any, before: Any) -> str:
    """Names the fields in which two records differ; empty for none. An empty value is unknown and equals all."""
    current, earlier = asdict(now), asdict(before)
    pairs = ((name, earlier[name], current[name]) for name in current)
    return "; ".join(
        f"{name} was {old} and is {new}" for name, old, new in pairs if old != new and "" not in (old, new)
    )


Kind = Literal["new", "replay", "frozen"]
"""``new``: today's rows; ``replay``: a promoted day's; ``frozen``: rows that compare versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    kind: Kind
    day: str
    """Date; empty for frozen rows."""
    path: str
    """Relative to the recipe's folder."""
    files: dict[str, int]
    """Size of each file in bytes, by its name relative to ``path``."""
    digest: str
    """SHA-256 of the files' names and content."""
    stamp: str = ""
    """Fingerprint of the files' times of change; where it is another, the digest is computed again."""
    rows: int = 0
    trained: int = 0
    """Rows for training; the others are held out for the comparison on fresh rows."""
    samples: int = 0

    @property
    def name(self) -> str:
        """Such as ``new 2026-11-22``."""
        return f"{self.kind} {self.day}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """``sources.json``: the training data and the steps of a day."""

    schema_version: int = 2
    day: str
    seed: int
    """Seed of the order and of the held-out rows."""
    fresh_share: float
    """Held-out part of the rows."""
    batch: int
    num_steps: int
    sources: tuple[SourceRecord, ...]
    """New ones first."""
    frozen: SourceRecord

    def drawn(self, steps: int) -> tuple[int, ...]:
        """Returns each source's number of samples in the first ``steps`` steps, which its samples are spread over."""
        return tuple(round(source.samples * steps / self.num_steps) for source in self.sources)

    def of_kind(self, kind: Kind) -> tuple[SourceRecord, ...]:
        return tuple(source for source in self.sources if source.kind == kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """The conditions of a plan; a change of one requires a new plan."""

    model: str
    """Fingerprint of the parameters' names, shapes and types."""
    batch: str
    """Fingerprint of the first batch's names, shapes and types."""
    modalities: str
    """Modalities of today's new rows, by the names in their scores."""
    device: str
    num_ranks: int
    torch: str
    colocate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """``plan.json``: the plan of a day."""

    schema_version: int = 2
    plan: Plan | None
    """The placement; None for the plain loop."""
    threads: int
    """Torch's threads within an operator, in the loop's own thread."""
    key: PlanKey
    description: str
    """Result of ``describe()`` at the choice."""
    speedup: float | None
    """Step time of the plain loop over this plan's, from its trial; None without a trial."""
    why: str
    """Reason to plan; empty for the plan of the day before."""
    is_measured: bool
    """True if it rests on measurements or places nothing; False if the machine was too busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """``environment.json``: the environment at a day's start, which bits depend on beside data, weights and plan."""

    schema_version: int = 1
    python: str
    torch: str
    numpy: str
    mosaic: str
    commit: str
    """Commit of Mosaic's clone; empty outside a clone, or if git failed."""
    machine: str
    device: str
    """Name of the GPU and its driver, or ``cpu``."""
    threads: int
    num_ranks: int
    tf32: bool
    """Matrix products may round their inputs."""
    program: str
    """SHA-256 of the user's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayNotes:
    loaded: str
    """Start of the model, with its new and missing parts."""
    rejects: dict[str, dict[str, int]]
    differs_from_step: int | None = None
    """First step whose bits may differ from an undisturbed run; None for none."""
    differs_because: str = ""
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``trained.json``: the end of a day's training."""

    schema_version: int = 1
    ended: str
    """``done``, ``window over``, or the name of a signal."""
    step: int
    num_steps: int
    digest: str
    """SHA-256 over all parameters and buffers."""
    sha256: str = ""
    """SHA-256 of the exported file; empty before the export."""
    notes: DayNotes
