"""The task of a method of planning, and its answer."""

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
    """Shares of a device that are considered as quotas, above 0 and up to 100; None: every slot."""
    use_spare_slots: bool = True
    """Give slots that a stage leaves idle to the modules that gain from them; Algorithm 1 does not."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    hold_memory: bool = True
    """No device is given more than it has over the whole step, with what modules of all stages keep there
    (``held_memory.py``); otherwise each stage's memory is checked alone."""
    layers: int = 1
    """Equal consecutive layers of each module, between which Spindle slices; 1 keeps modules whole, and the plan can
    run."""

    def __post_init__(self) -> None:
        if self.percents is not None and (not self.percents or not all(0 < p <= 100 for p in self.percents)):
            raise ValueError(f"percents={self.percents}; give at least one share, each above 0 and at most 100")
        if self.layers < 1:
            raise ValueError(f"layers={self.layers}; a module has at least 1 layer")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A planning problem."""

    method: str
    graph: ModuleGraph
    options: Mapping[str, Sequence[DeploymentOption]]
    """For each module the ways to deploy it alone."""
    cost: Cost
    """Times, memory and interference."""
    machine: Machine
    in_turn: tuple[StageResult, ...]
    """Every module in turn, each at its own best: what any other plan has to beat."""
    is_held: bool
    """True if memory held across stages can rule anything out."""
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
    """In the order of their forward pass."""
    record: SearchRecord
