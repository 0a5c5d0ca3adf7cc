"""The handle that ``mosaic.colocate`` returns: the plan that runs, what it did, and the way back."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mosaic.checkpoint.methods import KeepsCheckpoints
from mosaic.engine.attachment import Attachment
from mosaic.engine.finding.changes import Makeup
from mosaic.engine.finding.find import Finding
from mosaic.engine.placing import PlacedPlan, Runs
from mosaic.engine.profiled import source_of
from mosaic.engine.trial.run import Trial
from mosaic.engine.trial.setup import TrialSetup
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.timeline import Timeline

_LOG = logging.getLogger("mosaic")
_CLASSES = "to know: placed modules have classes derived from their own: isinstance(m, T) holds, type(m) is T does not"


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
        self._attachment = Attachment(model, finding, before_call=self._before_call)
        self._attachment.begin(placed, trial)
        self._warn()

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
        return self._executor is not None and not self._executor.closed and self._attachment.enabled

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
        for name, obstacle in self._finding.left_out.items():
            lines.append(f"not placed: {name}: {obstacle.sentence}")
        lines.extend(f"to know: {remark}" for remark in self._finding.remarks)
        lines.extend(self._makeup.changes(self._model, self.graph.names))
        if self._executor is not None:
            lines.append(_CLASSES)
            for name, reason in self._executor.in_order.items():
                lines.append(f"{name} keeps to the order of the loop's own stream: {reason}")
            for (name, reason), count in self._executor.in_place.items():
                place = self._executor.places[name, reason]
                lines.append(f"{count} call{'s' if count > 1 else ''} of {name} ran in place ({place}): {reason}")
            lines.extend(self._executor.notes)
        if self.profile is not None:
            lines.append(source_of(self.profile))
        if self._trial is not None:
            lines.extend(self._trial.report.sentences)
        lines.extend(self._notes)
        return "\n".join(lines)

    def _warn(self) -> None:
        """Logs what the user should not miss."""
        for sentence in self._finding.warnings:
            _LOG.warning("%s", sentence)

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
        tried = self._trial.report.metrics if self._trial is not None else {}
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
        attachment = self._attachment
        before, attachment.enabled = attachment.enabled, False
        self._settle()
        if self._trial is not None:
            self._trial.spoil()
        try:
            yield
        finally:
            attachment.enabled = before

    def remove(self) -> None:
        """Gives the modules their plain classes back and ends the lanes; calling it again does nothing."""
        self._attachment.end()
        self.finish_saving()

    def _plan_name(self) -> str:
        return self.plan.fingerprint

    def _settle(self) -> None:
        self._attachment.settle()

    def _before_call(self) -> None:
        """Called before each call of the whole model."""

    @property
    def _placed(self) -> PlacedPlan | None:
        return self._attachment.placed

    @property
    def _executor(self) -> Runs | None:
        return self._placed.executor if self._placed is not None else None

    @property
    def _trial(self) -> Trial | None:
        return self._attachment.trial
