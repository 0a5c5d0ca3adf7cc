"""The handle that ``mosaic.colocate`` returns: the plan that runs, what it did, and the way back."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mosaic.artifact import load_as
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.engine.attachment import Attachment
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.finding.find import Sample
from mosaic.engine.placing import Executor, PlacedPlan
from mosaic.engine.session import Request, Session, names_of, source_of
from mosaic.engine.trial import Trial
from mosaic.errors import ModuleContractError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.timeline import Timeline

_LOG = logging.getLogger("mosaic")
_PLAIN = "the model runs as it was"
_CLASSES = "note: placed modules have classes derived from their own: isinstance(m, T) holds, type(m) is T does not"


class Handle(Checkpointer):
    """A colocated model."""

    def __init__(self, session: Session, prepare: Callable[[Request], Session]) -> None:
        self._model = session.model
        self._prepare = prepare
        self._reasons: list[str] = []
        self._is_over = False
        self._begin(session)

    def _begin(self, session: Session, num_steps: int = 0) -> None:
        self._session = session
        self._attachment = Attachment(self._model, session.finding, before_call=self._before_call)
        self._attachment.num_steps = num_steps
        self._attachment.begin(session.placed, session if session.candidates else None)
        self._log()

    @property
    def plan(self) -> Plan:
        """Stages and partitions that the model runs on; the best known one while it runs as it was."""
        return self._placed.plan if self._placed is not None else self._session.plan

    @property
    def profile(self) -> Profile | None:
        """The measurements behind the plan; None for a plan that came without them."""
        return self._session.profile

    @property
    def graph(self) -> ModuleGraph:
        """The model's modules and which feeds which."""
        return self._session.finding.graph

    @property
    def active(self) -> bool:
        """Returns True if placed modules run on their lanes now; ``describe()`` says why they do not."""
        return self._executor is not None and not self._executor.closed and self._attachment.enabled

    @property
    def num_learned(self) -> int:
        """Number of first calls of their kind, which ran where they were made, on another number of threads.

        A loop that has to give the same bits after a restart repeats a step in which this grew.
        """
        return self._executor.num_learned if self._executor is not None else 0

    @property
    def is_trying(self) -> bool:
        """Returns True if plans are being tried, so that it is not decided yet what runs."""
        return self._trial is not None and self._trial.is_running

    def describe(self) -> str:
        """Says in plain lines what runs where, what does not and why, and what to know about this machine."""
        lines, executor = [], self._executor
        runs_plain = executor is None and not self.is_trying
        if runs_plain:
            lines.append(f"{_PLAIN}:")
        for index, stage in enumerate(() if runs_plain else self.plan.stages):
            for placed in stage.placements:
                slots = f"slot{'s' if placed.quota > 1 else ''} {', '.join(map(str, placed.slots))}"
                predicted = f", predicted {placed.forward_ms:.2f} + {placed.backward_ms:.2f} ms" if self.profile else ""
                lane = None if executor is None or executor.closed else executor.lanes.lane(placed.slots)
                num_sms = getattr(lane, "num_sms", None)
                of = f"{self.plan.device.num_slots}" + ("" if num_sms is None else f" ({num_sms} SMs)")
                is_alone = executor is not None and self.plan.is_alone(placed.module)
                where = ", in the loop's own thread" if is_alone else ""
                lines.append(f"stage {index}: {placed.module} on {slots} of {of}{where}{predicted}")
        if self.profile is not None and not runs_plain:
            lines.append(f"slot time in use: {self.plan.utilisation:.0%}, modelled from predicted times")
        for name, obstacle in self._session.finding.left_out.items():
            lines.append(f"not placed: {name}: {obstacle.sentence}")
        if executor is not None:
            lines.append(_CLASSES)
            for (name, reason), count in executor.in_place.items():
                place = executor.places[name, reason]
                lines.append(f"{count} call{'s' if count > 1 else ''} of {name} ran in place ({place}): {reason}")
            lines.extend(executor.notes)
        if self.profile is not None:
            lines.append(source_of(self.profile))
        if self._trial is not None:
            lines.extend(self._trial.report.sentences)
        lines.extend(self._session.notes)
        if self._reasons:
            times = f", {len(self._reasons)} times so far" if len(self._reasons) > 1 else ""
            lines.append(f"planned anew{times}: {self._reasons[-1]}")
        return "\n".join(lines)

    __str__ = describe

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self._model).__name__}: {self._state()}>"

    def _state(self) -> str:
        if self._is_over:
            return "removed; the model is the plain one"
        if self.is_trying:
            return "plans are tried in the loop's next steps, and the fastest runs"
        if self._executor is None:
            notes = (*self._session.notes, "") if self._trial is None else self._trial.report.sentences
            return f"{_PLAIN}: {notes[0]}".removesuffix(": ")
        stages = ", then ".join(" beside ".join(p.module for p in stage.placements) for stage in self.plan.stages)
        gain = f", predicted {self.plan.predicted_speedup:.2f} times as fast" if self.profile is not None else ""
        return f"runs {stages}{gain}"

    def _log(self) -> None:
        _LOG.info("%s", self._state())

    def metrics(self) -> dict[str, float]:
        """Returns measured medians of the recorded steps as a flat dict, to be logged as it is.

        ``steps`` (of the optimizer, or backward passes where no optimizer steps), ``overlap`` (share of lane time with
        another lane busy), ``calls_in_place``, ``forward_ms/MODULE``, ``backward_ms/MODULE``, ``replans``, and
        ``setup_ms/find``, ``profile``, ``solve`` and ``open``. Of a trial: ``trials``, ``trial_steps``,
        ``trial_lost_ms``, and the median steps in ``trial_ms/plain`` and ``trial_ms/PLAN``.
        """
        executor, timeline = self._executor, self.timeline()
        times: dict[str, list[float]] = {}
        for span in timeline.spans:
            if span.phase != "glue":
                times.setdefault(f"{span.phase}_ms/{span.module}", []).append(span.end_ms - span.start_ms)
        return {
            "steps": float(self._attachment.num_steps or (executor.num_backwards if executor is not None else 0)),
            "overlap": timeline.overlap,
            "calls_in_place": float(sum(executor.in_place.values())) if executor is not None else 0.0,
            **{name: statistics.median(values) for name, values in sorted(times.items())},
            **(self._trial.report.metrics if self._trial is not None else {}),
            "replans": float(len(self._reasons)),
            **{f"setup_ms/{part}": took_ms for part, took_ms in self._session.setup_ms.items()},
        }

    def timeline(self, title: str = "colocated") -> Timeline:
        """Returns what ran in the recorded steps: on streams the first 100, then each tenth, and profiled ones."""
        spans = () if self._executor is None else self._executor.log.spans()
        first_ms = spans[0].start_ms if spans else 0.0
        spans = tuple(replace(s, start_ms=s.start_ms - first_ms, end_ms=s.end_ms - first_ms) for s in spans)
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
            self._trial.is_spoiled = True
        try:
            yield
        finally:
            attachment.enabled = before

    def replan(
        self,
        sample: Sample | None = None,
        *,
        reason: str,
        plan: Plan | str | Path | None = None,
        modules: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> None:
        """Plans anew for the model as it is now: modules were added, removed or replaced, or its batches changed.

        Called between steps. Weights, optimizers, hooks, gradients and this handle stay as they are; only modules that
        changed are measured. Add new parameters to the optimizer (``add_param_group``), and drop those of modules that
        are gone before the next ``save``. If it fails, the model is plain, and ``replan`` may be called again.

        Args:
            sample: One batch of those to come; by default the last one.
            reason: Shown by ``describe()``.
            plan: Runs instead of one that is solved for.
            modules: As for ``mosaic.colocate``; by default as before.
            exclude: Likewise.

        Raises:
            ValueError: There is no reason, or a plan and a method were given.
            ModuleContractError: It is called in the middle of a step, or after ``remove``.
            MosaicError: As ``mosaic.colocate``.
        """
        if not reason.strip():
            raise ValueError(f"reason={reason!r} is empty; pass the reason for planning again")
        before = self._session.request
        request = replace(
            before,
            sample=before.sample if sample is None else sample,
            plan=load_as(Plan, plan),
            modules=before.modules if modules is None else names_of(modules),
            exclude=before.exclude if exclude is None else names_of(exclude) or (),
            options=replace(before.options, profile=None),  # which was of the model before
        )
        self._replan(request)
        self._reasons.append(reason)

    def _replan(self, request: Request) -> None:
        if self._is_over:
            raise ModuleContractError("replan() after remove(); call mosaic.colocate again")
        if not self._attachment.enabled:
            raise ModuleContractError("replan() inside of handle.disabled(); leave that block before")
        if self._attachment.is_busy or torch._C._current_graph_task_id() != -1 or on_lane():
            raise ModuleContractError(
                "replan() in the middle of a step: the backward of a call has yet to come, or to end; call it after "
                "optimizer.step(), or drop the results that nobody will differentiate"
            )
        num_steps = self._attachment.num_steps
        self._settle()
        self._attachment.end()
        try:
            session = self._prepare(request)
        except BaseException as error:
            error.add_note("handle.replan() failed; the model runs as it was written, with its weights, until the next")
            session = self._session
            session.placed, session.candidates, session.notes = None, (), (f"the last replan failed: {error}",)
            self._begin(session, num_steps)
            raise
        self._begin(session, num_steps)

    def remove(self) -> None:
        """Restores the plain classes of modules and ends the lanes; a second call does nothing."""
        self._is_over = True
        self._attachment.end()
        self.finish_saving()

    def _plan_name(self) -> str:
        return self.plan.fingerprint

    def _settle(self) -> None:
        self._attachment.settle()

    def _before_call(self) -> None:  # of the whole model; optional
        return

    @property
    def _placed(self) -> PlacedPlan | None:
        return self._attachment.placed

    @property
    def _executor(self) -> Executor | None:
        return self._placed.executor if self._placed is not None else None

    @property
    def _trial(self) -> Trial | None:
        return self._attachment.trial
