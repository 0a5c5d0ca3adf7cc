"""Everything that a trial is given: plans, ways to open their lanes, and what it asks of the model's attachment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mosaic.cost import Cost
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.trial.plans import name_of
from mosaic.engine.trial.settings import StepClock, TrialSettings
from mosaic.engine.trial.turn import TrialTurn
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan


class Runner(Protocol):
    """What a trial asks of the handle."""

    @property
    def graph(self) -> ModuleGraph:
        """The model's modules."""

    @property
    def enabled(self) -> bool:
        """False inside of ``disabled()``."""

    @property
    def has_pending(self) -> bool:
        """Whether a plain call waits for its backward."""

    def take_modules(self, *, track: bool) -> None:
        """Takes the placed modules' calls."""

    def release_modules(self) -> None:
        """Gives the placed modules their plain classes back."""

    def switch_to(self, placed: PlacedPlan | None) -> None:
        """Runs the model on other lanes from now on, or as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetup:
    """What a trial begins with."""

    settings: TrialSettings
    """Bounds."""
    plans: tuple[Plan, ...]
    """Plans to try."""
    graphs: tuple[bool, ...]
    """Whether to launch as CUDA graphs: each of these is tried with each plan."""
    launch_share: Callable[[], float]
    """Asks, once lanes were opened, for the time to launch the modules as a share of their time on the device; where
    that is large, the best plan is tried as CUDA graphs, too. 0: leave them out."""
    cost: Cost | None
    """What the plans were made with; None: they are not made again."""
    open: Callable[[TriedPlan, bool], PlacedPlan]
    """Opens the lanes of a candidate; takes whether to adopt the loop's shapes."""
    opens_ahead: bool
    """Whether lanes are opened before the loop, since that takes long."""
    clock: StepClock
    """What tells the time."""
    turn: TrialTurn
    """Lets one trial of a process run at a time."""
    sm_target: bool = False
    """Whether to try the best plan with an SM target, too."""
    tenants: Callable[[], frozenset[int]] | None = None
    """Asks for the other processes on the device; None where nobody knows."""


@dataclass(slots=True)
class TriedPlan:
    """One plan that takes part."""

    plan: Plan
    """What to run."""
    graphs: bool
    """Whether as CUDA graphs."""
    cost: Cost | None
    """What it was made with."""
    sm_target: bool = False
    """Whether libraries are given the SM counts of its lanes."""
    placed: PlacedPlan | None = None
    """Its lanes while they are open."""
    errors: int = 0
    """Calls of the model that raised under it."""

    @property
    def name(self) -> str:
        """What ``describe()`` calls it."""
        graphs, target = ", as CUDA graphs" if self.graphs else "", ", with SM targets" if self.sm_target else ""
        return f"{name_of(self.plan)}{graphs}{target}"

    def close(self) -> None:
        """Ends its lanes."""
        if self.placed is not None:
            self.placed.close()
            self.placed = None
