"""What a handle begins with: what was asked for, and what became of it. ``colocate`` makes it, and ``replan`` anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mosaic.backends.base import Backend
from mosaic.engine.finding.find import Finding, Sample
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.trial.setup import TrialSetup
from mosaic.files import load_as
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.solver.runnable import check_method


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What ``mosaic.colocate`` was asked for; see there.

    Raises:
        ValueError: There is no such method, or a plan makes it needless.
    """

    sample: Sample
    """One batch; kept for a later ``replan`` that is given none."""
    plan: Plan | None = None
    """To run instead of solving for one."""
    modules: Sequence[str] | None = None
    """Those to place."""
    exclude: Sequence[str] = ()
    """Those to leave where they are."""
    backend: Backend | None = None
    """Where to run."""
    options: Options = DEFAULT_OPTIONS
    """How to plan, measure and run."""

    def __post_init__(self) -> None:
        check_method(self.options.method, self.plan)

    def again(
        self,
        sample: Sample | None,
        plan: Plan | str | Path | None,
        modules: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
    ) -> Asked:
        """Returns what is asked for next, of a model that has changed: a plan or profile was for what it was."""
        return replace(
            self,
            sample=self.sample if sample is None else sample,
            plan=load_as(Plan, plan),
            modules=self.modules if modules is None else names_of(modules),
            exclude=self.exclude if exclude is None else names_of(exclude) or (),
            options=replace(self.options, profile=None),
        )


def names_of(names: str | Sequence[str] | None) -> Sequence[str] | None:
    """Returns names or patterns of modules as a sequence, where one alone may have been given."""
    return (names,) if isinstance(names, str) else names


class Laps:
    """Times of the parts of getting a model ready.

    Attributes:
        ms: Milliseconds of each part so far.
    """

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds what the block takes to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.ms[part] = self.ms.get(part, 0.0) + (time.perf_counter() - began) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A model that is ready to run: on a plan, on several in turn, or as it was."""

    finding: Finding
    """Its modules."""
    plan: Plan
    """What to run; the best known one where the model runs as it was."""
    profile: Profile | None = None
    """What the plan was made from; None for a plan that was given without one."""
    notes: tuple[str, ...] = ()
    """What ``describe()`` says of it."""
    placed: PlacedPlan | None = None
    """Lanes of the plan; None where it is tried first, or does not run."""
    trial: TrialSetup | None = None
    """How plans are to be tried; None where nothing is."""
    is_rough: bool = False
    """Whether other processes used the CPU while its modules were profiled."""
    setup_ms: Mapping[str, float] = field(default_factory=dict)
    """What getting it ready took: ``find``, ``profile``, ``solve`` and ``open``, in milliseconds."""


MakesReady = Callable[[Asked], Ready]
"""Gets a handle's model ready, which nobody has attached."""
