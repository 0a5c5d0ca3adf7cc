"""What a day's training leaves in files: the plan that it runs, where it ran, and how it ended. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from mosaic.pipelining.kept_way import KeptWay
from mosaic.plan import Plan

WINDOW_OVER = "window over"
"""How training ends whose device has to be given back."""


NEW_WEIGHTS = "new weights"
"""What a model started from that is no champion's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """What a plan was made for; where one of these changes, it is made anew."""

    model: str
    """Fingerprint of the parameters' names, shapes and types."""
    batch: str
    """Fingerprint of the first batch's names, shapes and types."""
    modalities: str
    """What today's new rows have, as their scores name it."""
    device: str
    """Name of the device."""
    num_ranks: int
    """Processes that train."""
    torch: str
    """Version of torch."""
    colocate: bool
    """Whether the recipe lets modules run side by side."""
    pipeline: str = ""
    """What the recipe says of a pipeline; empty for none."""

    def differences(self, other: PlanKey) -> str:
        """Says what is not as it was for another one; empty where nothing differs."""
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
        if "num_ranks" in differing and "batch" in differing:  # a rank's part of the batch is another one then
            differing.remove("batch")
        return "; ".join(words[name] for name in differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """``plan.json``: what a day runs."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    plan: Plan | None
    """What runs where; None for the plain loop, or a pipeline."""
    threads: int
    """Of torch, within an operator, in the loop's own thread."""
    key: PlanKey
    """What it was made for."""
    said: str
    """What ``describe()`` said when it was chosen."""
    speedup: float | None
    """The plain loop's step over this plan's, measured in its trial; None where nothing was tried."""
    step_ms: float | None
    """Median time of a step while this plan was new, in ms; what a drift is seen against. None before it is known."""
    why: str
    """Why it was made; empty where it is the plan of the day before."""
    is_measured: bool
    """Whether it was made from measurements, or nothing is to be placed; False where the machine was too busy."""
    pipeline: KeptWay | None = None
    """Which layers are on which rank, and how steps are planned; None for no pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """``environment.json``: where a day's training began; what bits depend on beside data, weights and plan."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    python: str
    torch: str
    numpy: str
    mosaic: str
    commit: str
    """Of Mosaic's clone; empty outside of one, and where git could not say it, as when it is killed."""
    machine: str
    """Processor and system."""
    device: str
    """Name of the GPU and its driver, or ``cpu``."""
    threads: int
    """Of torch, within an operator."""
    num_ranks: int
    """Processes that train."""
    tf32: bool
    """Whether matrix products may round their inputs."""
    program: str
    """SHA-256 of the user's file."""

    def differences(self, other: Environment) -> tuple[str, ...]:
        """Returns what differs from another one, a phrase each; a commit that is not known differs from none."""
        mine, theirs = asdict(self), asdict(other)
        if not (self.commit and other.commit):
            mine["commit"] = theirs["commit"] = ""
        return tuple(f"{name} was {theirs[name]} and is {mine[name]}" for name in mine if mine[name] != theirs[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``trained.json``: how a day's training ended."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    ended: str
    """``done``, ``window over``, or the name of a signal."""
    step: int
    """Steps that are done."""
    num_steps: int
    """Steps of the day."""
    step_ms: float | None
    """Median of the last process, in ms."""
    digest: str
    """SHA-256 over all parameters and buffers."""
    notes: DayNotes
    """What its checkpoints said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayNotes:
    """What every checkpoint of a day carries along."""

    loaded: str
    """What the model started from, and what is new or gone in it."""
    rejects: dict[str, dict[str, int]]
    """Rows that could not be read, by source and reason."""
    differs_from_step: int | None = None
    """First step that may have other bits than an undisturbed run; None for none."""
    differs_because: str = ""
    """Why."""
    messages: tuple[str, ...] = ()
    """What the morning should know."""
