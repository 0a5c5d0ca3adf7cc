"""What ``mosaic.colocate`` returns: the plan that runs, what it did, and the way back."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mosaic.backends.base import Lanes
from mosaic.engine.attach import attach, detach
from mosaic.engine.find import Finding
from mosaic.engine.planned_from import source_of
from mosaic.engine.shapes import shapes_of
from mosaic.engine.site import Site
from mosaic.engine.structure import flatten
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.timeline import Span, Timeline


class Runs(Protocol):
    """A way to run placed calls: on the host's threads, or on streams."""

    in_place: Counter[tuple[str, str]]
    places: dict[tuple[str, str], str]
    in_order: dict[str, str]
    closed: bool

    @property
    def lanes(self) -> Lanes:
        """The lanes of the plan."""

    def call(self, site: Site, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a placed module."""

    def whole(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own call; its result is plain."""

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepares parameters that belong to no placed module."""

    def settle(self) -> None:
        """Orders what the caller does next behind all that the lanes were given."""

    def close(self) -> None:
        """Ends the lanes; calling it again does nothing."""

    @property
    def num_backwards(self) -> int:
        """How many backwards have run."""

    @property
    def origin_ns(self) -> int:
        """When the oldest recorded piece of work started."""

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        """Returns what ran, in milliseconds since ``origin_ns``."""

    def clear_spans(self) -> None:
        """Forgets what ran so far."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What else the user should know about how calls ran."""


class Handle:
    """A colocated model.

    Attributes:
        plan: Stages and partitions that the model runs on.
        graph: Its modules and which feeds which.
        profile: What the plan was made from; None for a plan that was given without one.
        active: Whether calls are placed; False where Mosaic stepped aside, with the reason in ``describe()``.
    """

    def __init__(
        self,
        model: nn.Module,
        finding: Finding,
        plan: Plan,
        *,
        profile: Profile | None,
        executor: Runs | None,
        notes: tuple[str, ...],
    ) -> None:
        self.plan = plan
        self.profile = profile
        self._model = model
        self._finding = finding
        self._notes = notes
        self._executor = executor
        self._enabled = True
        self._attached: list[nn.Module] = []
        self._before_step: RemovableHandle | None = None
        if executor is not None:
            self._attach(executor)

    @property
    def graph(self) -> ModuleGraph:
        """The model's modules and which feeds which."""
        return self._finding.graph

    @property
    def active(self) -> bool:
        """Whether placed modules run on their lanes now."""
        return self._executor is not None and not self._executor.closed and self._enabled

    def describe(self) -> str:
        """Says in plain lines what runs where, what does not and why, and what to know about this machine."""
        lines = []
        if self._executor is None:
            lines.append("the model runs as it was:")
        for index, stage in enumerate(self.plan.stages):
            for placed in stage.placements:
                slots = f"slot{'s' if placed.quota > 1 else ''} {', '.join(map(str, placed.slots))}"
                predicted = f", predicted {placed.forward_ms:.2f} + {placed.backward_ms:.2f} ms" if self.profile else ""
                of = f"{self.plan.device.num_slots}{self._granted(placed.slots)}"
                lines.append(f"stage {index}: {placed.module} on {slots} of {of}{predicted}")
        for name, reason in self._finding.left_out.items():
            lines.append(f"not placed: {name}: {reason}")
        if self._executor is not None:
            for name, reason in self._executor.in_order.items():
                lines.append(f"{name} keeps to the order of the loop's own stream: {reason}")
            for (name, reason), count in self._executor.in_place.items():
                place = self._executor.places[name, reason]
                lines.append(f"{count} call{'s' if count > 1 else ''} of {name} ran in place ({place}): {reason}")
            lines.extend(self._executor.notes)
        if self.profile is not None:
            lines.append(source_of(self.profile))
        lines.extend(self._notes)
        return "\n".join(lines)

    def _granted(self, slots: tuple[int, ...]) -> str:
        """Says how many SMs the device gave for a partition, where its lanes know."""
        if self._executor is None or self._executor.closed:
            return ""
        num_sms = getattr(self._executor.lanes.lane(slots), "num_sms", None)
        return "" if num_sms is None else f" ({num_sms} SMs)"

    def metrics(self) -> dict[str, float]:
        """Returns measured medians of the recorded steps as a flat dict, to be logged as it is.

        ``steps``, ``overlap`` (share of lane time with another lane busy), ``calls_in_place``, and for each module
        ``forward_ms/NAME`` and ``backward_ms/NAME``.
        """
        if self._executor is None:
            return {"steps": 0.0, "overlap": 0.0, "calls_in_place": 0.0}
        timeline = self.timeline()
        times: dict[str, list[float]] = {}
        for span in timeline.spans:
            if span.phase != "glue":
                times.setdefault(f"{span.phase}_ms/{span.module}", []).append(span.end_ms - span.start_ms)
        return {
            "steps": float(self._executor.num_backwards),
            "overlap": timeline.overlap,
            "calls_in_place": float(sum(self._executor.in_place.values())),
            **{name: statistics.median(values) for name, values in sorted(times.items())},
        }

    def timeline(self, title: str = "colocated") -> Timeline:
        """Returns what ran on the lanes in the recorded steps (the last 20,000 pieces of work)."""
        spans = () if self._executor is None else self._executor.spans(self._executor.origin_ns)
        return Timeline(title=title, num_slots=self.plan.device.num_slots, spans=spans)

    def clear_timeline(self) -> None:
        """Forgets what ran so far, so that the next timeline starts now."""
        if self._executor is not None:
            self._executor.clear_spans()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the plain model inside the block, for comparison, debugging, or gradients of gradients."""
        before, self._enabled = self._enabled, False
        if self._executor is not None:
            self._executor.settle()
        try:
            yield
        finally:
            self._enabled = before

    def remove(self) -> None:
        """Gives the modules their plain classes back and ends the lanes; calling it again does nothing."""
        for module in self._attached:
            detach(module)
        self._attached.clear()
        if self._before_step is not None:
            self._before_step.remove()
        if self._executor is not None:
            self._executor.close()

    def _attach(self, executor: Runs) -> None:
        try:
            for subject in self._finding.subjects:
                site = Site(
                    subject.name,
                    subject.module,
                    executor.lanes.lane(self.plan.placement(subject.name).slots),
                    shapes=shapes_of(flatten((subject.args, subject.kwargs))[0]),
                    is_alone=self.plan.is_alone(subject.name, num_slots=self.plan.device.num_slots),
                    parted=self._finding.parted.get(subject.name, frozenset()),
                )
                self._take(subject.module, self._placed(executor, site))
            placed = {id(p) for subject in self._finding.subjects for p in subject.module.parameters()}
            placed -= set().union(*self._finding.parted.values())
            executor.watch(p for p in self._model.parameters() if id(p) not in placed)
            # Branches that the loop calls itself may still be running when the optimizer changes their weights.
            self._before_step = register_optimizer_step_pre_hook(lambda *_: executor.settle())
            if not any(module is self._model for module in self._attached):
                self._take(self._model, self._whole(executor))
        except BaseException:
            self.remove()
            raise

    def _take(self, module: nn.Module, intercept: Any) -> None:
        attach(module, intercept, self._executor.settle if self._executor is not None else None)
        self._attached.append(module)

    def _placed(self, executor: Runs, site: Site) -> Any:
        def intercept(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return executor.call(site, plain, args, kwargs) if self._enabled else plain(*args, **kwargs)

        return intercept

    def _whole(self, executor: Runs) -> Any:
        def intercept(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return executor.whole(plain, args, kwargs) if self._enabled else plain(*args, **kwargs)

        return intercept
