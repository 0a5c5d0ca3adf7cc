"""The task of a planning method, and its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mosaic.cost import Cost
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord, TemporalStage
from mosaic.solver.limits import SearchLimits
from mosaic.solver.options import DeploymentOption
from mosaic.solver.predict import PlacedTimes
from mosaic.solver.stage import Machine, StageResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Search settings."""

    percents: tuple[float, ...] | None = None
    """Quotas to consider, in percent of a device, above 0 and up to 100; None: every number of slots."""
    use_spare_slots: bool = True
    """Assign a stage's idle slots to modules that gain from them; Algorithm 1 does not."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    hold_memory: bool = True
    """Check each device's memory over the whole step, with the memory that modules of all stages hold
    (``held_memory.py``); otherwise for each stage alone."""
    layers: int = 1
    """Number of equal consecutive layers of each module, for Spindle's slices; 1 keeps modules whole, so the plan can
    run."""

    def __post_init__(self) -> None:
        if self.percents is not None and (not self.percents or not all(0 < p <= 100 for p in self.percents)):
            raise ValueError(f"percents={self.percents}; use at least one, each above 0 and at most 100")
        if self.layers < 1:
            raise ValueError(f"layers={self.layers}; use at least 1")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A planning problem."""

    method: str
    graph: ModuleGraph
    options: Mapping[str, Sequence[DeploymentOption]]
    """Ways to deploy each module alone."""
    cost: Cost
    """Times, memory and interference."""
    machine: Machine
    in_turn: tuple[StageResult, ...]
    """Modules one after the other, each at its own best: the plan to beat."""
    is_held: bool
    """True if memory held across stages can rule out a plan."""
    search: SearchOptions
    """Granularity, limits and ablations."""
    forbidden: Sequence[Collection[str]] = ()
    """Sets of modules that must not be stages; for the exact search."""

    @cached_property
    def times(self) -> PlacedTimes:
        return PlacedTimes(self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A method's answer."""

    stages: tuple[TemporalStage, ...]
    """In forward order."""
    record: SearchRecord
