"""What ``mosaic.colocate`` returns: the plan that runs, what it did, and the way back."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mosaic.checkpoint.methods import KeepsCheckpoints
from mosaic.engine.calls.attach import attach, detach
from mosaic.engine.finding.changes import Makeup
from mosaic.engine.finding.find import Finding
from mosaic.engine.placing import PendingBackwards, PlacedPlan, Runs
from mosaic.engine.planned_from import source_of
from mosaic.engine.trial.run import Trial
from mosaic.engine.trial.setup import TrialSetup
from mosaic.engine.trial.steps import StepUnit, outer_shapes
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.timeline import Timeline


class Handle(KeepsCheckpoints):
    """A colocated model.

    Attributes:
        profile: What the plan was made from; None for a plan that was given without one.
        active: Whether calls are placed now; False where Mosaic stepped aside, with the reason in ``describe()``, and
            while a trial runs the plain loop.
    """

    def __init__(
        self,
        model: nn.Module,
        finding: Finding,
        plan: Plan,
        *,
        profile: Profile | None,
        notes: tuple[str, ...],
        placed: PlacedPlan | None = None,
        trial: TrialSetup | None = None,
    ) -> None:
        self._plan = plan
        self.profile = profile
        self._model = model
        self._finding = finding
        self._makeup = Makeup(model)
        self._notes = notes
        self._placed = placed
        self._enabled = True
        self._taken: list[nn.Module] = []
        self._root: nn.Module | None = None
        self._before_step: RemovableHandle | None = None
        self._registrations: list[RemovableHandle] = []
        self._has_new_parts = False
        self._pending: PendingBackwards | None = None
        self._depth = 0
        self._trial: Trial | None = None
        self._unit = StepUnit(model)
        if placed is None and trial is None:
            return
        try:
            self.take_modules(track=False)
            if placed is not None:
                self._watch_loose_parameters(placed)
            if trial is not None:
                self._trial = Trial(self, trial)
            self._take_root()
            self._before_step = _before_optimizer_steps(self)
            self._registrations = _after_registrations(self)
        except BaseException:
            self.remove()
            raise

    @property
    def plan(self) -> Plan:
        """Stages and partitions that the model runs on; the best known one while it runs as it was."""
        return self._placed.plan if self._placed is not None else self._plan

    @property
    def graph(self) -> ModuleGraph:
        """The model's modules and which feeds which."""
        return self._finding.graph

    @property
    def active(self) -> bool:
        """Whether placed modules run on their lanes now."""
        return self._executor is not None and not self._executor.closed and self._enabled

    @property
    def is_trying(self) -> bool:
        """Whether plans are being tried, so that it is not decided yet what runs."""
        return self._trial is not None and self._trial.is_running

    def describe(self) -> str:
        """Says in plain lines what runs where, what does not and why, and what to know about this machine."""
        lines = []
        if self._executor is None and not self.is_trying:
            lines.append("the model runs as it was:")
        for index, stage in enumerate(self.plan.stages):
            for placed in stage.placements:
                slots = f"slot{'s' if placed.quota > 1 else ''} {', '.join(map(str, placed.slots))}"
                predicted = f", predicted {placed.forward_ms:.2f} + {placed.backward_ms:.2f} ms" if self.profile else ""
                of = f"{self.plan.device.num_slots}{self._granted(placed.slots)}"
                where = ", in the loop's own thread" if self._is_alone(placed.module) else ""
                lines.append(f"stage {index}: {placed.module} on {slots} of {of}{where}{predicted}")
        for name, reason in self._finding.left_out.items():
            lines.append(f"not placed: {name}: {reason}")
        lines.extend(f"to know: {remark}" for remark in self._finding.remarks)
        lines.extend(self._makeup.changes(self._model, self.graph.names))
        if self._executor is not None:
            for name, reason in self._executor.in_order.items():
                lines.append(f"{name} keeps to the order of the loop's own stream: {reason}")
            for (name, reason), count in self._executor.in_place.items():
                place = self._executor.places[name, reason]
                lines.append(f"{count} call{'s' if count > 1 else ''} of {name} ran in place ({place}): {reason}")
            lines.extend(self._executor.notes)
        if self.profile is not None:
            lines.append(source_of(self.profile))
        if self._trial is not None:
            lines.extend(self._trial.sentences())
        lines.extend(self._notes)
        return "\n".join(lines)

    def _is_alone(self, module: str) -> bool:
        return self._executor is not None and self.plan.is_alone(module, num_slots=self.plan.device.num_slots)

    def _granted(self, slots: tuple[int, ...]) -> str:
        """Says how many SMs the device gave for a partition, where its lanes know."""
        if self._executor is None or self._executor.closed:
            return ""
        num_sms = getattr(self._executor.lanes.lane(slots), "num_sms", None)
        return "" if num_sms is None else f" ({num_sms} SMs)"

    def metrics(self) -> dict[str, float]:
        """Returns measured medians of the recorded steps as a flat dict, to be logged as it is.

        ``steps``, ``overlap`` (share of lane time with another lane busy), ``calls_in_place``, and for each module
        ``forward_ms/NAME`` and ``backward_ms/NAME``. Where plans were tried: ``trials``, ``trial_steps``,
        ``trial_lost_ms``, and the median step of each in ``trial_ms/PLAN``.
        """
        tried = self._trial.metrics() if self._trial is not None else {}
        if self._executor is None:
            return {"steps": 0.0, "overlap": 0.0, "calls_in_place": 0.0, **tried}
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
            **tried,
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
        self._settle()
        if self._trial is not None:
            self._trial.spoil()
        try:
            yield
        finally:
            self._enabled = before

    def remove(self) -> None:
        """Gives the modules their plain classes back and ends the lanes; calling it again does nothing."""
        self.release_modules()
        if self._root is not None:
            detach(self._root)
            self._root = None
        if self._before_step is not None:
            self._before_step.remove()
        for hook in self._registrations:
            hook.remove()
        if self._trial is not None:
            self._trial.stop()
        if self._placed is not None:
            self._placed.close()
        self.finish_saving()

    def _plan_name(self) -> str:
        return self.plan.fingerprint

    # What a trial asks for.

    @property
    def enabled(self) -> bool:
        """Whether lanes may be used: not inside of ``disabled()``."""
        return self._enabled

    @property
    def has_pending(self) -> bool:
        """Whether a call that ran in the plain way waits for its backward."""
        return bool(self._pending)

    def take_modules(self, *, track: bool) -> None:
        """Takes the calls of placed modules, if that is not done.

        Args:
            track: Whether to follow plain calls until their backward.

        Raises:
            ValueError: Another handle has them.
        """
        self._pending = PendingBackwards() if track else None
        if not self._taken:
            for subject in self._finding.subjects:
                attach(subject.module, self._placed_call(subject.name), self._settle)
                self._taken.append(subject.module)

    def release_modules(self) -> None:
        """Gives the placed modules their plain classes back."""
        for module in self._taken:
            detach(module)
        self._taken.clear()
        self._pending = None

    def switch_to(self, placed: PlacedPlan | None) -> None:
        """Runs the model on other lanes from now on, or in the plain way; nothing may be in flight."""
        if placed is self._placed:
            return
        if self._placed is not None:
            self._placed.executor.pause()
        self._placed = placed
        if placed is not None:
            placed.executor.resume()
            self._watch_loose_parameters(placed)

    # Parts.

    @property
    def _executor(self) -> Runs | None:
        return self._placed.executor if self._placed is not None else None

    def _settle(self) -> None:
        if self._placed is not None:
            self._placed.executor.settle()

    def _watch_loose_parameters(self, placed: PlacedPlan) -> None:
        """Prepares the parameters that belong to no placed module."""
        own = {id(p) for subject in self._finding.subjects for p in subject.module.parameters()}
        own -= set().union(*self._finding.parted.values())
        placed.executor.watch(p for p in self._model.parameters() if id(p) not in own)

    def _take_root(self) -> None:
        if not any(module is self._model for module in self._taken):
            attach(self._model, self._whole_call, self._settle)
            self._root = self._model

    def _placed_call(self, name: str) -> Any:
        def intercept(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            placed = self._placed
            if placed is not None and self._enabled:
                result = placed.call(name, plain, args, kwargs)
            else:
                result = plain(*args, **kwargs)
            if self._pending is not None:
                self._pending.note(result)
            return result

        return intercept

    def _whole_call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._trial is None or self._depth:
            return self._run_whole(plain, args, kwargs)
        if self._unit.begins_at_call():
            self._settle()
            self._trial.boundary()
        self._trial.before_call(outer_shapes(args, kwargs))
        self._depth += 1
        try:
            return self._run_whole(plain, args, kwargs)
        except BaseException as error:
            self._trial.note_error(error)
            raise
        finally:
            self._depth -= 1

    def _run_whole(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        placed = self._placed
        if placed is not None and self._has_new_parts:  # lanes may compute the gradients of new parameters, too
            self._has_new_parts = False
            self._watch_loose_parameters(placed)
        return (
            placed.executor.whole(plain, args, kwargs)
            if placed is not None and self._enabled
            else plain(*args, **kwargs)
        )

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Branches that the loop calls itself may still be running when the optimizer changes their weights."""
        self._settle()
        if self._trial is None:
            return
        if self._unit.begins_at_step(optimizer):
            if self._unit.has_counted_calls:
                self._unit.has_counted_calls = False
                self._trial.start_over("the loop trains now")
            self._trial.boundary()


def _before_optimizer_steps(handle: Handle) -> RemovableHandle:
    """Tells a handle of every optimizer's steps; torch's table is global, so it must not keep the model alive."""
    found = weakref.ref(handle)

    def before(optimizer: Optimizer, *_: Any) -> None:
        alive = found()
        if alive is not None:  # else it stays as it is: torch is going through its table
            alive._before_optimizer(optimizer)

    return register_optimizer_step_pre_hook(before)


def _after_registrations(handle: Handle) -> list[RemovableHandle]:
    """Tells a handle that some module has got a part or a parameter, which may be one of its model's."""
    found = weakref.ref(handle)

    def noted(*_: Any) -> None:
        alive = found()
        if alive is not None:  # else it stays as it is: torch is going through its table
            alive._has_new_parts = True

    return [register_module_module_registration_hook(noted), register_module_parameter_registration_hook(noted)]
