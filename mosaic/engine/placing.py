"""An executable plan: its lanes and its placed modules. Only one plan is active at a time."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from mosaic.backends.base import Lanes
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.finding.find import Finding
from mosaic.find.structure import flatten, shapes_of
from mosaic.find.trace import caller
from mosaic.plan import Plan
from mosaic.timeline import Span

_LOG = logging.getLogger("mosaic")


class SpanLog:
    """The last 20,000 pieces of work on lanes, in milliseconds of one clock; threads may add at the same time."""

    def __init__(self) -> None:
        self.num_backwards = 0  # that have ended
        self._spans: deque[tuple[float, float, str, Any, tuple[int, ...], int]] = deque(maxlen=20_000)

    def add(self, module: str, phase: Any, slots: tuple[int, ...], step: int, start_ms: float, end_ms: float) -> None:
        if slots:  # routing between ranks holds none
            self._spans.append((start_ms, end_ms, module, phase, slots, step))

    def spans(self) -> tuple[Span, ...]:
        return tuple(
            Span(module=module, phase=phase, slots=slots, step=step, start_ms=start_ms, end_ms=end_ms)
            for start_ms, end_ms, module, phase, slots, step in sorted(self._spans, key=lambda span: span[0])
        )

    def clear(self) -> None:
        self._spans.clear()


class Executor(ABC):
    """Runs placed calls on the host's threads, on streams, or on several ranks."""

    calls_again = False  # the model, where a module's call was unforeseen
    has_failed = False  # work on a lane, in the present call of the model
    num_learned = 0  # first calls of their kind, which ran in place
    log: SpanLog

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.closed = False
        self.in_place: Counter[tuple[str, str]] = Counter()  # calls that ran where they were made: module and reason
        self.places: dict[tuple[str, str], str] = {}  # and the line of the first one

    def note_in_place(self, module: str, reason: str) -> None:
        """Counts a call that runs where it is made; logs the first one for a reason, with its line."""
        self.in_place[module, reason] += 1
        if (module, reason) not in self.places:
            self.places[module, reason] = caller()
            _LOG.warning("%s runs in place at %s: %s", module, self.places[module, reason], reason)

    @abstractmethod
    def call(
        self, site: PlacedModule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def call_plainly(self, site: PlacedModule, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call while lanes are disabled."""
        return run(*args, **kwargs)

    @abstractmethod
    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call; its result is plain."""

    @abstractmethod
    def reach(self, site: PlacedModule) -> None:
        """Orders what the caller does next behind a module's forward."""

    @abstractmethod
    def settle(self) -> None:
        """Orders what the caller does next behind all that the lanes were given."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def is_in_flight(self) -> bool:
        """True if a backward needs this executor."""

    def forget_calls(self) -> None:  # optional
        """Forgets operations of a model call that raised, though a traceback may keep them alive."""
        return

    @property
    def num_backwards(self) -> int:
        return self.log.num_backwards

    def clear_spans(self) -> None:
        self.log.clear()

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Further remarks on how calls ran."""


class PlacedPlan:
    def __init__(self, plan: Plan, finding: Finding, executor: Executor) -> None:
        self.plan = plan
        self.executor = executor
        self.on_streams = executor.lanes.streams is not None
        self.sites = {
            subject.name: PlacedModule(
                subject.name,
                subject.module,
                executor.lanes.lane(plan.placement(subject.name).slots),
                shapes=shapes_of(flatten((subject.args, subject.kwargs))[0]),
                is_alone=plan.is_alone(subject.name),
                parted=finding.parted.get(subject.name, frozenset()),
            )
            for subject in finding.subjects
        }
        for name, obstacle in (finding.exchanging if self.on_streams else finding.in_place).items():
            self.sites[name].obstacle = obstacle

    @property
    def is_in_flight(self) -> bool:
        """True if a call waits for a backward that only this plan's lanes can run as the plain loop would."""
        sites = () if self.on_streams else self.sites.values()  # autograd's own graph ends under any plan
        return self.executor.is_in_flight or any(site.in_flight or site.in_place for site in sites)

    def forget_calls(self) -> None:
        self.executor.forget_calls()
        for site in self.sites.values():
            site.forget_calls()
