"""The trial of plans in a user's own loop: turns change at its step boundaries, while no backward is pending.

``Turns`` decides, ``DriftWatch`` notices later changes, and ``SampleComparison`` excludes plans that compute something
else.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.candidates import PlanCandidate, clock_of
from mosaic.engine.session import Session
from mosaic.errors import ModuleContractError, MosaicError, said_by
from mosaic.take_turns import PLAIN, Decision, TrialReport, TrialSettings, Turns, Visit

_LOG = logging.getLogger("mosaic")
_MAX_BUSY = 5
"""Step boundaries in a row with a pending backward, after which a candidate is given up."""
_MAX_ERRORS = 2
_MAX_REFUSALS = 200
_CALLS_WITHOUT_OPTIMIZER = 8
_STEPS_OF_ANOTHER = 8
_DRIFT_WINDOW, _DRIFT_MARGIN = 20, 1.1


# The steps of a loop.


class StepUnit:
    """Finds the optimizer steps, or the calls of the model, at which a step of the loop begins.

    A step lies between two steps of an optimizer that holds the model's parameters; with accumulation that is the
    whole cycle. Of several optimizers the first one counts, until others step and it does not. A loop without an
    optimizer, which calls the model without gradients, is counted in calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._chosen: weakref.ref[Optimizer] | None = None
        self._num_others = self._num_calls = 0
        self.has_counted_calls = False  # whether calls of the model were counted, before the first optimizer step
        self._is_frozen = not any(parameter.requires_grad for parameter in model.parameters())

    def begins_at_step(self, optimizer: Optimizer) -> bool:
        """Records a step of any optimizer; returns whether a step of the loop begins with it."""
        if not self._holds(optimizer):
            return False
        chosen = self._chosen() if self._chosen is not None else None
        if chosen is not optimizer:
            self._num_others += 1
            if chosen is not None and self._num_others < _STEPS_OF_ANOTHER:
                return False
            self._chosen = weakref.ref(optimizer)
        self._num_others = 0
        return True

    def begins_at_call(self) -> bool:
        """Records a call of the whole model; returns whether a step of the loop begins with it."""
        if self._chosen is not None:
            return False
        trains = torch.is_grad_enabled() and not self._is_frozen
        self._num_calls = 0 if trains else self._num_calls + 1
        self.has_counted_calls |= self._num_calls >= _CALLS_WITHOUT_OPTIMIZER
        return self._num_calls >= _CALLS_WITHOUT_OPTIMIZER

    def _holds(self, optimizer: Optimizer) -> bool:
        known = self._known.get(optimizer)
        if known is None or known[0] != len(optimizer.param_groups):
            model = self._model()
            own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
            held = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            known = self._known[optimizer] = (len(optimizer.param_groups), held)
        return known[1]


def outer_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Returns the shapes of tensors among a call's arguments and one level inside of them: cheap, once a step."""
    shapes: list[Hashable] = [torch.is_grad_enabled()]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            shapes.append(value.shape)
        elif isinstance(value, Mapping | list | tuple):
            items = value.values() if isinstance(value, Mapping) else value
            shapes.extend(item.shape for item in items if isinstance(item, torch.Tensor))
    return tuple(shapes)


class DriftWatch:
    """Watches the steps after a trial; each method returns a sentence once the loop has changed.

    A loop has drifted when the medians of windows that make up ``drift_steps`` steps in a row are all above what nine
    of ten steps took in the trial, and above its median by 10 % at least; or when as many steps in a row had one same
    other shape.
    """

    def __init__(self, samples: Sequence[float], shapes: Hashable, settings: TrialSettings) -> None:
        self.shapes = shapes
        self._drift_steps = settings.drift_steps
        self._window: list[float] = []
        self._num_slow = self._num_others = 0
        self._other: Hashable = None
        self._limit_ms = _limit(samples) if samples else None

    def note_time(self, step_ms: float) -> str | None:
        self._window.append(step_ms)
        if len(self._window) < _DRIFT_WINDOW:
            return None
        median, window = statistics.median(self._window), self._window
        self._window = []
        if self._limit_ms is None:
            self._limit_ms = _limit(window)
            return None
        self._num_slow = self._num_slow + _DRIFT_WINDOW if median > self._limit_ms else 0
        if self._num_slow < self._drift_steps:
            return None
        limit = f"{median:.2f} ms, above {self._limit_ms:.2f}"
        return f"{self._num_slow} steps in a row were slower than in the trial: {limit}"

    def note_shapes(self, shapes: Hashable) -> str | None:
        if shapes == self.shapes:
            self._num_others = 0
            return None
        self._num_others = self._num_others + 1 if shapes == self._other else 1
        self._other = shapes
        if self._num_others < self._drift_steps:
            return None
        return f"the last {self._num_others} batches had other shapes than those of the trial"


def _limit(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return max(ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))], _DRIFT_MARGIN * statistics.median(ordered))


class TrialLock:
    """Held by one trial of the process at a time: two trials would measure each other's changes.

    A trial whose loop has stopped stepping loses it to one whose loop goes on.
    """

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._num_refusals = 0

    def acquire(self, trial: object) -> bool:
        holder = self._holder() if self._holder is not None else None
        if holder is not None and holder is not trial and self._num_refusals < _MAX_REFUSALS:
            self._num_refusals += 1
            return False
        self._holder, self._num_refusals = weakref.ref(trial), 0
        return True

    def release(self, trial: object) -> None:
        if self._holder is not None and self._holder() is trial:
            self._holder, self._num_refusals = None, 0


@cache
def _lock_of_process() -> TrialLock:
    return TrialLock()


# The trial.


class Trial:
    """The trials of one colocated model, from its first step to its last."""

    def __init__(self, attachment: Any, session: Session, settings: TrialSettings) -> None:
        self.decision: Decision | None = None  # the end of the last trial; None before
        self.num_trials = 0
        self._attachment = attachment
        self._session = session
        self._settings = settings
        self._candidates = session.candidates
        backend = session.request.backend
        self._on_host = backend.device.kind == "host"  # plans cannot be switched while a plain call's backward is due
        self._clock = settings.clock if settings.clock is not None else clock_of(backend)
        self._phase: Literal["waiting", "trying", "watching", "over"] = "waiting"
        self._excluded: dict[int, str] = {}
        self._turns = self._new_turns()
        self._visit: Visit | None = None
        self._winner: PlanCandidate | None = None
        self._watch: DriftWatch | None = None
        self._marks: deque[tuple[Any, Hashable]] = deque()
        self._key: list[Hashable] = []  # of the present step: the shapes of its calls
        self._is_spoiled = False  # the present step's time cannot be compared with others
        self._num_launched = self._num_busy = self._num_failed = self._steps_since = 0
        self._reference: Hashable = None
        self._last_key: Hashable = None
        self._is_leaving = self._was_busy = False
        self._why = "the loop begins"

    def open_all(self) -> None:
        """Opens the lanes of all candidates, and excludes those whose numbers are not the plain loop's."""
        comparison = None
        try:
            comparison = self._session.compare()
        except Exception as error:  # whatever the backward of the model's results, or putting it back, raises
            _LOG.warning("plans are tried without a comparison on the sample, which raised %s", said_by(error))
        for number, candidate in enumerate(self._candidates, 1):
            try:
                candidate.placed = self._session.open_lanes(candidate, False)
                self._attachment.switch_to(candidate.placed)
                reason = comparison.difference() if comparison is not None else None
            except MosaicError as error:
                kind = "it failed on the sample" if candidate.placed is not None else "its lanes could not be opened"
                reason = f"{kind}: {error}"
            except Exception as error:  # whatever the model raises under a plan and did not raise without it
                if candidate.placed is None:
                    raise
                reason = f"it failed on the sample: {said_by(error)}"
            finally:
                self._attachment.switch_to(None)
            if reason is not None:
                self._excluded[number] = reason
                candidate.close()
                _LOG.warning("the trial goes on without %s: %s", candidate.name, reason)

    @property
    def is_running(self) -> bool:
        return self._phase in ("waiting", "trying")

    @property
    def report(self) -> TrialReport:
        turns = self._turns
        if self._phase == "waiting" and self.decision is None:
            head = f"trial: not begun; {len(self._candidates)} plans will be tried in the loop's next steps"
            names = [candidate.name for candidate in self._candidates]
            excluded = tuple(f"not tried {names[number - 1]}: {why}" for number, why in self._excluded.items())
            return TrialReport(sentences=(head, *excluded), metrics=turns.report("", None).metrics)
        if self.is_running or self.decision is None:
            head = f"trial: step {turns.num_steps} of {self._settings.max_steps} at most ({self._why})"
            head += "" if self.is_running else "; ended without a decision"
            return turns.report(head, None, num_trials=self.num_trials)
        which = f"trial {self.num_trials}" if self.num_trials > 1 else "trial"
        head = f"{which} ({self._why}): {self.decision.reason} ({turns.num_steps} steps, {turns.lost_ms:.1f} ms lost)"
        return turns.report(head, self.decision, num_trials=self.num_trials)

    # The loop.

    def boundary(self) -> None:
        """A step of the loop begins here: no work of the lanes is unordered."""
        if self._phase == "over":
            return
        if not self._attachment.enabled or torch._C._current_graph_task_id() != -1 or on_lane():
            self._is_spoiled = True  # a step inside of disabled(), or an optimizer that steps inside of backward
            return
        key: Hashable = None if self._is_spoiled else tuple(self._key)
        self._key, self._is_spoiled = [], False
        if self._phase == "trying":
            self._try_step(key)
        elif self._phase == "watching":
            self._watch_step(key)
        elif _lock_of_process().acquire(self):
            self._begin()

    def before_call(self, shapes: Hashable) -> None:
        if len(self._key) < 64:
            self._key.append(shapes)
        if self._phase == "trying":
            self._note_failed_backward()
            self._was_busy = self._is_busy()
            if self._is_leaving and not self._was_busy:
                self._end_visit()

    def note_error(self, error: BaseException) -> None:
        """The model's call raised: the trial goes on, without a plan that caused the error or that fails again."""
        self.spoil()
        candidate = self._present()
        if candidate is None or not isinstance(error, Exception):
            return
        if not self._was_busy and candidate.placed is not None:
            candidate.placed.forget_calls()
        candidate.num_errors += 1
        is_of_plan = isinstance(error, (ModuleContractError, torch.OutOfMemoryError, MemoryError))
        if is_of_plan or candidate.num_errors >= _MAX_ERRORS:
            first_line = (str(error).splitlines() or [""])[0]
            self._give_up(f"{type(error).__name__} was raised under it: {first_line}")

    def spoil(self) -> None:
        """The present step's time cannot be compared with others."""
        self._is_spoiled = True

    def start_over(self, why: str) -> None:
        """The loop is another one now, so no measurement counts: a new trial begins at the next boundary."""
        if self._phase in ("trying", "watching"):
            self._why, self._phase = why, "waiting"
            self._visit = self._winner = None
            _lock_of_process().release(self)
            self._attachment.switch_to(None)
            self._close_lanes()

    def stop(self) -> None:
        self._phase, self._winner = "over", None
        _lock_of_process().release(self)
        self._close_lanes()

    # The turns.

    def _new_turns(self) -> Turns:
        names = (PLAIN, *(candidate.name for candidate in self._candidates))
        late = {number for number, candidate in enumerate(self._candidates, 1) if candidate.is_variant}
        turns = Turns(self._settings, names, late=late)
        for number, reason in self._excluded.items():
            turns.exclude(number, reason)
        return turns

    def _begin(self) -> None:
        self.num_trials += 1
        self._phase = "trying"
        self._turns = self._new_turns()
        self._reference = self._last_key = None
        for candidate in self._candidates:
            candidate.num_errors = 0
        self._attachment.switch_to(None)
        try:
            self._attachment.take_modules(track=self._on_host)
        except ValueError as error:
            self._decide(Decision(winner=0, reason=f"no plan could be tried: {error}"))
            return
        self._advance()

    def _try_step(self, key: Hashable) -> None:
        assert self._visit is not None
        self._note_failed_backward()
        self._marks.append((self._clock.mark(), key))
        self._read_times(wait=False)
        self._num_launched += 1
        if self._num_launched < self._visit.num_steps and not self._turns.is_cut and not self._is_leaving:
            return
        if not self._is_busy():
            self._end_visit()
            return
        self._num_busy += 1
        if self._num_busy == _MAX_BUSY and self._visit.candidate:
            self._give_up("a backward is pending at every step")
        elif self._num_busy == _MAX_BUSY:
            self._decide(Decision(winner=0, reason="a backward is pending at every step, so nothing can be switched"))

    def _end_visit(self) -> None:
        self._num_busy, self._is_leaving = 0, False
        self._clock.settle()
        self._read_times(wait=True)
        self._advance()

    def _advance(self) -> None:
        """Begins the next turn; its preparation belongs to no step's time."""
        self._marks.clear()
        clock, before = self._clock, self._clock.mark()
        while isinstance(visit := self._turns.next_visit(), Visit):
            if self._enter(visit.candidate):
                break
        begun = clock.mark()
        clock.settle()
        self._turns.lost_ms += clock.ms_between(before, begun)
        if isinstance(visit, Decision):
            self._decide(visit)
            return
        self._visit, self._num_launched = visit, 0
        self._marks.append((begun, None))

    def _enter(self, number: int) -> bool:
        if not number:
            self._attachment.switch_to(None)
            return True
        candidate = self._candidates[number - 1]
        try:
            if candidate.placed is None:
                candidate.placed = self._session.open_lanes(candidate, self.num_trials > 1)
        except MosaicError as error:
            self._turns.exclude(number, f"its lanes could not be opened: {error}")
            return False
        self._num_failed = candidate.placed.executor.num_failed
        self._attachment.switch_to(candidate.placed)
        return True

    def _read_times(self, *, wait: bool) -> None:
        """Records the times that are known by now, or all of them."""
        while len(self._marks) > 1 and (wait or self._clock.is_past(self._marks[1][0])):
            earlier, _ = self._marks.popleft()
            later, key = self._marks[0]
            if not self._turns.candidates[0].rounds:  # the usual step of this loop is the first kind seen twice
                self._reference, self._last_key = self._last_key, key
            took = self._clock.ms_between(earlier, later)
            self._turns.note(took if key is not None and key == self._reference else None)

    def _decide(self, decision: Decision) -> None:
        self.decision = decision
        self._winner = self._candidates[decision.winner - 1] if decision.winner else None
        self._phase = "watching"
        self._visit = None
        self._steps_since = 0
        _lock_of_process().release(self)
        self._attachment.switch_to(self._winner.placed if self._winner is not None else None)
        self._close_lanes()
        if self._winner is None:
            self._attachment.release_modules()
        samples = self._turns.candidates[decision.winner].samples
        self._watch = DriftWatch(samples, self._reference, self._settings)
        self._marks.clear()
        _LOG.info("%s", self.report.sentences[0])

    # After the decision.

    def _watch_step(self, key: Hashable) -> None:
        clock, watch = self._clock, self._watch
        assert watch is not None
        self._steps_since += 1
        self._marks.append((clock.mark(), key))
        changed = watch.note_shapes(key) if key is not None else None
        while len(self._marks) > 1 and clock.is_past(self._marks[1][0]):
            earlier, _ = self._marks.popleft()
            later, measured_key = self._marks[0]
            if measured_key == watch.shapes:
                changed = watch.note_time(clock.ms_between(earlier, later)) or changed
        enough = self._steps_since >= self._settings.retrial_steps << (self.num_trials - 1)
        if changed is not None and enough and not self._is_busy():
            _LOG.info("plans are tried again: %s", changed)
            self.start_over(changed)

    # Parts.

    def _close_lanes(self) -> None:
        for candidate in self._candidates:
            if candidate is not self._winner:
                candidate.close()

    def _present(self) -> PlanCandidate | None:
        if self._phase != "trying" or self._visit is None or not self._visit.candidate:
            return None
        return self._candidates[self._visit.candidate - 1]

    def _is_busy(self) -> bool:
        candidate = self._present() or self._winner
        if candidate is not None and candidate.placed is not None and candidate.placed.is_in_flight:
            return True
        return bool(self._attachment.has_pending)

    def _note_failed_backward(self) -> None:
        candidate = self._present()
        if candidate is None or candidate.placed is None:
            return
        failed = candidate.placed.executor.num_failed
        if failed > self._num_failed:
            self._num_failed = failed
            self.note_error(RuntimeError("a backward failed"))

    def _give_up(self, reason: str) -> None:
        assert self._visit is not None
        self._turns.exclude(self._visit.candidate, reason)
        self._is_leaving = True
        _LOG.warning("the trial goes on without %s: %s", self._turns.candidates[self._visit.candidate].name, reason)
