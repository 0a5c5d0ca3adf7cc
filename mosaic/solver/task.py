"""The task of a method of planning, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mosaic.cost import Cost
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord, Stage
from mosaic.solver.exact.search import Knowledge, Objective, SearchHint, SearchLimits
from mosaic.solver.options import DeploymentOption, QuotaGrid
from mosaic.solver.planners.draft import PlannerSettings
from mosaic.solver.replan.remembered import Remembered
from mosaic.solver.stage import Machine, StageResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search; every part can be switched off, to measure what it is worth."""

    grid: QuotaGrid = field(default_factory=QuotaGrid)
    """Quotas to consider; by default every slot."""
    objective: Objective = "phases"
    """What an exact search minimises: ``phases``, each stage's slowest forward plus its slowest backward, which is what
    a plan predicts; or ``sum``, the paper's Eq. 4."""
    prune: bool = True
    """Algorithm 1, line 11: drop merges that cannot beat the best so far."""
    cache: bool = True
    """Evaluate a set of modules only once."""
    use_spare_slots: bool = True
    """Give slots that a stage leaves idle to the modules that gain from them; Algorithm 1 does not."""
    stagger: bool = True
    """Choose slots so that modules can start before the stage before has ended everywhere."""
    deterministic_limit: float = 1.0
    """Effort for one CP-SAT question, in its deterministic time (about seconds)."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    """What ends an exact search."""
    hold_memory: bool = True
    """No device is given more than it has over the whole step, with what modules of all stages keep there
    (``holding.py``); otherwise each stage's memory is checked alone."""
    planners: PlannerSettings = field(default_factory=PlannerSettings)
    """What the planners that Mosaic is compared with need to know; by default they keep modules whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to plan."""

    method: str
    """Name of the method that was asked for."""
    graph: ModuleGraph
    """What to place."""
    options: Mapping[str, Sequence[DeploymentOption]]
    """For each module the ways to deploy it alone."""
    cost: Cost
    """Times, memory and interference."""
    machine: Machine
    """What there is to place on."""
    memo: Remembered
    """What is known of modules and stages."""
    in_turn: tuple[StageResult, ...]
    """Every module in turn, each at its own best: what any other plan has to beat."""
    is_held: bool
    """Whether memory held across stages can rule anything out."""
    search: SearchOptions
    """Granularity, limits and ablations."""
    hint: SearchHint | None = None
    """What an exact search is told beforehand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A method's answer."""

    stages: tuple[Stage, ...]
    """In the order of their forward pass."""
    record: SearchRecord
    """How they were found."""
    predicted_ms: float | None = None
    """What the method itself predicts; None where that is the plan's own prediction."""
    known: Knowledge | None = None
    """What an exact search found out, for later ones."""
