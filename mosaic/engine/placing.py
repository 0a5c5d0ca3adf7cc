"""An executable plan: its lanes and its placed modules. Only one plan is active at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from mosaic.backends.base import Lanes
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.finding.find import Finding
from mosaic.find.structure import flatten, shapes_of
from mosaic.find.trace import caller
from mosaic.plan import Plan
from mosaic.timeline import Span

_LOG = logging.getLogger("mosaic")


class Executor(Protocol):
    """Runs placed calls on the host's threads, on streams, or on several ranks."""

    lanes: Lanes
    in_place: Counter[tuple[str, str]]
    places: dict[tuple[str, str], str]
    in_order: dict[str, str]
    calls_again: bool = False
    closed: bool

    def call(
        self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call; its result is plain."""

    def reach(self, site: PlacedModule) -> None:
        """Orders what the caller does next behind a module's forward."""

    def settle(self) -> None:
        """Orders what the caller does next behind all that the lanes were given."""

    def close(self) -> None: ...

    @property
    def is_in_flight(self) -> bool:
        """True if a backward needs this executor."""

    def forget_calls(self) -> None:
        """Forgets operations of a model call that raised, though a traceback may keep them alive."""
        return

    @property
    def num_learned(self) -> int:
        """Number of first calls of their kind, which ran where they were made, on another number of threads."""
        return 0

    @property
    def num_backwards(self) -> int:
        """Number of finished backwards."""

    def spans(self) -> tuple[Span, ...]:
        """Returns what ran, by start, in milliseconds of one clock."""

    def clear_spans(self) -> None: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Further remarks on how calls ran."""


class PlacedPlan:
    """The lanes of one plan and the sites of its modules."""

    def __init__(self, plan: Plan, finding: Finding, executor: Executor) -> None:
        self.plan = plan
        self.executor = executor
        self.on_streams = executor.lanes.launches_inline
        self.sites = {
            subject.name: PlacedModule(
                subject.name,
                subject.module,
                executor.lanes.lane(plan.placement(subject.name).slots),
                shapes=shapes_of(flatten((subject.args, subject.kwargs))[0]),
                is_alone=plan.is_alone(subject.name, num_slots=plan.device.num_slots),
                parted=finding.parted.get(subject.name, frozenset()),
            )
            for subject in finding.subjects
        }
        if not self.on_streams:
            for name, obstacle in finding.in_place.items():
                self.sites[name].obstacle = obstacle

    @property
    def is_in_flight(self) -> bool:
        """True if a call waits for a backward that only this plan's lanes can run as the plain loop would."""
        if self.on_streams:  # autograd's own graph; any plan may follow
            return self.executor.is_in_flight
        return self.executor.is_in_flight or any(site.in_flight or site.in_place for site in self.sites.values())

    def forget_calls(self) -> None:
        self.executor.forget_calls()
        for site in self.sites.values():
            site.forget_calls()

    def close(self) -> None:
        self.executor.close()


def note_in_place(executor: Executor, module: str, reason: str) -> None:
    """Counts a call that runs where it is made; logs the first one for a reason, with its line."""
    executor.in_place[module, reason] += 1
    if (module, reason) not in executor.places:
        executor.places[module, reason] = caller()
        _LOG.warning("%s runs in place at %s: %s", module, executor.places[module, reason], reason)
