"""The JSON files of a day: its plan, environment and training, the gate's result, and the report. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from mosaic.pipelining.plan import PipelinePlan
from mosaic.plan import Plan

Outcome = Literal["promoted", "held", "refused", "quarantined", "failed", "interrupted"]
"""Outcome of a day. ``held``: passed the gate during a ``hold``; ``refused``: failed the gate; ``quarantined``: its
data was not trained on; ``interrupted``: not finished, will resume."""

HEADLINES: dict[Outcome, str] = {
    "promoted": "PROMOTED",
    "held": "KEPT",
    "refused": "KEPT",
    "quarantined": "KEPT",
    "failed": "FAILED",
    "interrupted": "NOT FINISHED",
}
"""Headline of the page."""


WINDOW_OVER = "window over"
"""End of a training whose device must be released."""

NEW_WEIGHTS = "new weights"
"""Start of a model without a champion."""


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
    """The recipe lets modules run side by side."""
    pipeline: str = ""
    """The recipe's pipeline settings, in words; empty for none."""

    def differences(self, other: PlanKey) -> str:
        """Describes the differences from an earlier key; empty for none."""
        words = {
            "model": "the model has other parameters",
            "batch": "the batch has other shapes",
            "modalities": f"the new rows had {other.modalities} and have {self.modalities}",
            "device": f"the device was {other.device} and is {self.device}",
            "num_ranks": f"there were {other.num_ranks} ranks and are {self.num_ranks}",
            "torch": f"torch was {other.torch} and is {self.torch}",
            "colocate": f"colocate was {str(other.colocate).lower()} and is {str(self.colocate).lower()}",
            "pipeline": f"the pipeline was {other.pipeline or 'none'} and is {self.pipeline or 'none'}",
        }
        differing = [name for name in words if getattr(self, name) != getattr(other, name)]
        if "num_ranks" in differing and "batch" in differing:  # the ranks change each rank's part of the batch
            differing.remove("batch")
        return "; ".join(words[name] for name in differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """``plan.json``: the plan of a day."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    plan: Plan | None
    """The placement; None for the plain loop, or a pipeline."""
    threads: int
    """Torch's threads within an operator, in the loop's own thread."""
    key: PlanKey
    said: str
    """Result of ``describe()`` at the choice."""
    speedup: float | None
    """Step time of the plain loop over this plan's, from its trial; None without a trial."""
    step_ms: float | None
    """Median step time while this plan was new, in ms, the reference for a drift; None before it is known."""
    why: str
    """Reason to plan; empty for the plan of the day before."""
    is_measured: bool
    """True if it rests on measurements or places nothing; False if the machine was too busy."""
    pipeline: PipelinePlan | None = None
    """The layers of each rank and the plan of steps; None for no pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """``environment.json``: the environment at a day's start, which bits depend on beside data, weights and plan."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
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

    def differences(self, other: Environment) -> tuple[str, ...]:
        """Describes each difference from an earlier environment; an unknown commit differs from none."""
        current, earlier = asdict(self), asdict(other)
        if not (self.commit and other.commit):
            current["commit"] = earlier["commit"] = ""
        return tuple(
            f"{name} was {earlier[name]} and is {current[name]}" for name in current if current[name] != earlier[name]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``trained.json``: the end of a day's training."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    ended: str
    """``done``, ``window over``, or the name of a signal."""
    step: int
    num_steps: int
    step_ms: float | None
    """Median step time of the last process, in ms."""
    digest: str
    """SHA-256 over all parameters and buffers."""
    notes: DayNotes


@dataclass(frozen=True, slots=True, kw_only=True)
class DayNotes:
    loaded: str
    """Start of the model, with its new and missing parts."""
    rejects: dict[str, dict[str, int]]
    """Unreadable rows, by source and reason."""
    differs_from_step: int | None = None
    """First step whose bits may differ from an undisturbed run; None for none."""
    differs_because: str = ""
    messages: tuple[str, ...] = ()
    """Messages for the morning's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Challenger and another version on the same rows; larger values are better."""

    name: str
    """``frozen``, ``anchor``, ``fresh``, or a slice, such as ``site=north``."""
    against: str
    """The compared version, such as ``0041``."""
    num_rows: int
    num_clusters: int
    old: float
    new: float
    difference: float
    """``new - old``."""
    low: float
    """Lower end of the interval of the difference, at the gate's confidence."""
    high: float
    limit: float
    """Limit of the lower end, below 0: minus the margin times the set's factor."""
    counts: bool
    """True if the verdict depends on it; slices and few fresh rows are shown only."""
    passed: bool
    """True if the lower end is above the limit; a slice also passes if its upper end is not below 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check beside the comparisons: validity, today's data."""

    name: str
    """Name, such as ``finite``, ``export``, ``size``, ``latency``, ``labels``, ``modalities``, ``champion's error``."""
    passed: bool
    sentence: str
    """The value, the rule, and after a failure the way out."""

    @staticmethod
    def of(name: str, passed: bool, sentence: str, way_out: str = "") -> Finding:
        """Makes a finding whose sentence has the way out after a failure."""
        return Finding(name=name, passed=passed, sentence=f"{sentence}{'' if passed else way_out}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """``gate.json``: the result of the gate."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    passes: bool
    """True if the challenger may be promoted."""
    reason: str
    todo: str
    """Task of a person; empty for none."""
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    margin: float
    """In units of the score."""
    confidence: float
    """One-sided, such as 0.95."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    name: str
    """``new`` or ``replay``, with the day."""
    rows: int
    drawn: int
    rejected: dict[str, int]
    """Unreadable rows, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """A figure of today's data beside that of earlier days."""

    name: str
    """Name, such as ``rows``, ``modality audio``, ``label 3``, ``mean image``."""
    today: float
    usual: float | None
    """Median of earlier days; None without any."""
    low: float | None
    """Lowest usual value; None without a rule."""
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A start of the day's training after the first."""

    at: str
    cause: str
    """Cause, such as ``killed (SIGKILL)``, ``window over``, ``SIGTERM``, ``new boot``."""
    from_step: int
    """First step of this start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySquare:
    day: str
    outcome: Outcome | None
    fresh: float | None
    """The champion's mean value on that day's held-out rows; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    began: str
    ended: str
    until: str | None
    """End of the window, UTC; None for none."""
    steps: int
    planned_steps: int
    num_ranks: int
    device: str
    """Name of the GPU, or of the host."""
    restarts: tuple[Restart, ...]
    identical: bool
    """True if the bits equal those of an undisturbed run."""
    differs_from_step: int | None
    """First step whose bits may differ; None for none."""
    differs_because: str
    plan: str
    """The plan that ran, in a sentence or a few lines."""
    speedup: float | None
    """Step time of the plain loop over the plan's, from its trial; None without a trial."""
    step_ms: float | None
    replanned: str
    """Reason to plan anew; empty for the plan of the day before."""
    loaded: str
    """Start of the model, and the names of its new and missing parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayReport:
    """``report.json``: the content of the page."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    title: str
    day: str
    """Cut-off of the data."""
    outcome: Outcome
    reason: str
    todo: str
    """Task of a person; empty for none."""
    gate: GateResult | None
    data_check: tuple[Finding, ...]
    data: tuple[SourceRows, ...]
    usual: tuple[Usual, ...]
    history: tuple[DaySquare, ...]
    """The last thirty days, the oldest first."""
    run: RunFacts | None
    champion: str | None
    """Version in force now; None for none."""
    challenger: str | None
    """Version of this day."""
    anchor: str | None
    digests: dict[str, str]
    """Digests by file: recipe, sources, plan, environment, model."""
    undo: str
    """Command that undoes today's promotion; empty without one."""
    scores: dict[str, float] = field(default_factory=dict)
    """The challenger's mean value on each set, such as ``frozen``."""
    messages: tuple[str, ...] = ()
    """Messages, such as failed hooks and checkpoints on a full disk."""
