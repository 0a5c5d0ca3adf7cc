"""The trial of plans in a user's own loop: turns change at its step boundaries, while no backward is pending.

``Turns`` decides, and ``SampleComparison`` excludes plans that compute something else. The plans are tried again once
steps are slower than in the trial, or where other processes used the CPU during it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mosaic.backends.streams.api import StreamApi
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.finding.find import runner_of
from mosaic.engine.session import PlanCandidate, Session
from mosaic.errors import MosaicError, said_by
from mosaic.find.restore import preserved
from mosaic.find.structure import tensors_in
from mosaic.profile import COMPARABLE_SHARE
from mosaic.profiler import ForeignLoad, Subject
from mosaic.take_turns import PLAIN, Decision, TrialReport, Turns, Visit

_LOG = logging.getLogger("mosaic")
_MAX_BUSY = 5  # step boundaries in a row with a pending backward, after which a candidate is given up
_RETRIAL_STEPS = 1000
"""Fewest steps between two trials; twice as many before each further one."""
_WINDOW, _DRIFT = 40, 1.1
"""Steps whose median is above nine of ten steps of the trial, and above its median by a tenth, are a drift."""


class Trial:
    """The trial of one colocated model in the first steps of its loop."""

    _under_way: ClassVar[weakref.WeakSet[Trial]] = weakref.WeakSet()  # two would measure each other's changes

    def __init__(self, attachment: Any, session: Session) -> None:
        self.decision: Decision | None = None  # None before the trial has ended
        self._attachment = attachment
        self._session = session
        assert session.trial_settings is not None
        self._settings = session.trial_settings
        self._candidates = session.candidates
        self._clock = LoopClock(session.request.backend.api)
        self._phase: Literal["waiting", "trying", "watching", "over"] = "waiting"
        self._number, self._why = 1, ""
        self._turns = self._new_turns()
        self._winner: PlanCandidate | None = None
        self._load: ForeignLoad | None = None
        self._was_loaded = False  # by other processes during the trial
        self._limit_ms = math.inf  # a median step above it is a drift
        self._watched: list[float] = []
        self._num_since = 0  # steps since the decision
        self._visit: Visit | None = None
        self._marks: deque[tuple[Any, Hashable]] = deque()
        self._key: list[Hashable] = []  # of the present step: the shapes of its calls
        self.is_spoiled = False  # the present step's time cannot be compared with others
        self._num_launched = self._num_busy = 0
        self._reference: Hashable = None
        self._last_key: Hashable = None
        self._is_leaving = self._was_busy = False

    def open_all(self) -> None:
        """Opens the lanes of all candidates, and excludes those whose numbers are not the plain loop's."""
        comparison, session, sample = None, self._session, self._session.request.sample
        try:
            run = runner_of(session.model, sample)
            comparison = SampleComparison(session.model, run, sample, session.finding.subjects)
        except Exception as error:  # whatever the backward of the model's results, or putting it back, raises
            _LOG.warning("plans are tried without a comparison on the sample, which raised %s", said_by(error))
        for number, candidate in enumerate(self._candidates, 1):
            reason = None
            try:
                candidate.placed = session.open_lanes(candidate)
                self._attachment.switch_to(candidate.placed)
                reason = comparison.difference() if comparison is not None else None
            except Exception as error:  # whatever the model raises under a plan and did not raise without it
                failed = "its lanes could not be opened" if candidate.placed is None else "it failed on the sample"
                reason = f"{failed}: {said_by(error)}"
            finally:
                self._attachment.switch_to(None)
            if reason is not None:
                self._exclude(number, reason)
                candidate.close()

    @property
    def is_running(self) -> bool:
        return self._phase in ("waiting", "trying")

    @property
    def report(self) -> TrialReport:
        turns, decision = self._turns, self.decision
        if self._phase == "waiting" and self._number == 1:
            when = "once another model's trial has ended" if self._under_way else "in the next steps of an optimizer"
            head = f"trial: not started; {len(self._candidates)} plans will be tried {when}"
            excluded = (f"not tried {each.name}: {each.exclusion}" for each in turns.candidates if each.exclusion)
            return TrialReport(sentences=(head, *excluded), metrics=turns.report("", None).metrics)
        which = f"trial {self._number} ({self._why})" if self._number > 1 else "trial"
        if decision is None:
            head = f"{which}: step {turns.num_steps} of {self._settings.max_steps} at most"
            head = head if self.is_running else f"{head}; ended without a decision"
        else:
            head = f"{which}: {decision.reason} ({turns.num_steps} steps, {turns.lost_ms:.1f} ms lost)"
        return turns.report(head, decision, num_trials=self._number)

    # The loop.

    def boundary(self) -> None:
        """A step of the loop begins here: no work of the lanes is unordered."""
        if self._phase == "over":
            return
        if not self._attachment.enabled or torch._C._current_graph_task_id() != -1 or on_lane():
            self.is_spoiled = True  # a step inside of disabled(), or an optimizer that steps inside of backward
            return
        key: Hashable = None if self.is_spoiled else tuple(self._key)
        self._key, self.is_spoiled = [], False
        if self._phase == "trying":
            self._try_step(key)
        elif self._phase == "watching":
            self._watch_step()
        elif not self._under_way:
            self._begin()

    def before_call(self, shapes: Hashable) -> None:
        if self._phase == "trying":
            if len(self._key) < 64:
                self._key.append(shapes)
            self._was_busy = self._attachment.is_busy
            if self._is_leaving and not self._was_busy:
                self._end_visit()

    def note_error(self, error: BaseException) -> None:
        """The model's call raised: the trial goes on without the plan that ran."""
        self.is_spoiled = True
        placed = self._attachment.placed
        if placed is not None and self._visit is not None and isinstance(error, Exception):
            if not self._was_busy:
                placed.forget_calls()
            self._give_up(f"{said_by(error)} was raised under it")

    def stop(self) -> None:
        """Ends the trial: another model's may begin; closes the lanes of all candidates."""
        self._phase, self._winner = "over", None
        self._leave()

    def _leave(self) -> None:
        self._under_way.discard(self)
        self._visit = None
        self._marks.clear()
        for candidate in self._candidates:
            if candidate is not self._winner:
                candidate.close()

    # The turns.

    def _new_turns(self) -> Turns:
        late = {number for number, candidate in enumerate(self._candidates, 1) if candidate.is_variant}
        return Turns(self._settings, (PLAIN, *(candidate.name for candidate in self._candidates)), late=late)

    def _begin(self) -> None:
        self._under_way.add(self)
        self._phase = "trying"
        self._load = ForeignLoad() if self._session.request.backend.device.kind == "host" else None
        self._advance()

    def _try_step(self, key: Hashable) -> None:
        assert self._visit is not None
        self._marks.append((self._clock.mark(), key))
        self._read_times(wait=False)
        self._num_launched += 1
        if self._num_launched < self._visit.num_steps and not self._turns.is_cut and not self._is_leaving:
            return
        if not self._attachment.is_busy:
            self._end_visit()
            return
        self._num_busy += 1
        if self._num_busy == _MAX_BUSY and self._visit.candidate:
            self._give_up("a backward is pending at every step")
        elif self._num_busy == _MAX_BUSY:
            self._decide(Decision(winner=0, reason="a backward is pending at every step, so plans cannot be switched"))

    def _end_visit(self) -> None:
        self._num_busy, self._is_leaving = 0, False
        self._clock.settle()
        self._read_times(wait=True)
        self._advance()

    def _advance(self) -> None:
        """Begins the next turn; its preparation belongs to no step's time."""
        self._marks.clear()
        clock, before = self._clock, self._clock.mark()
        visit = self._turns.next_visit()
        if isinstance(visit, Visit):
            self._attachment.switch_to(self._candidates[visit.candidate - 1].placed if visit.candidate else None)
        begun = clock.mark()
        clock.settle()
        self._turns.lost_ms += clock.ms_between(before, begun)
        if isinstance(visit, Decision):
            self._decide(visit)
            return
        self._visit, self._num_launched = visit, 0
        self._marks.append((begun, None))

    def _read_times(self, *, wait: bool) -> None:
        """Records the times that are known by now, or all of them."""
        while len(self._marks) > 1 and (wait or self._clock.is_past(self._marks[1][0])):
            earlier, _ = self._marks.popleft()
            later, key = self._marks[0]
            if not self._turns.candidates[0].samples:  # the usual step of this loop is the first kind seen twice
                self._reference, self._last_key = self._last_key, key
            took = self._clock.ms_between(earlier, later)
            self._turns.note(took if key is not None and key == self._reference else None)

    def _decide(self, decision: Decision) -> None:
        self.decision = decision
        self._phase, self._num_since, self._watched = "watching", 0, []
        self._was_loaded = self._load is not None and (self._load.share or 0.0) > COMPARABLE_SHARE
        winner = self._winner = self._candidates[decision.winner - 1] if decision.winner else None
        self._attachment.switch_to(winner.placed if winner is not None else None)
        self._leave()
        if winner is None:
            self._attachment.release_modules()
        samples = sorted(self._turns.candidates[decision.winner].samples)
        if samples:
            ninth = samples[min(len(samples) - 1, round(0.9 * len(samples)))]
            self._limit_ms = max(ninth, _DRIFT * statistics.median(samples))
        _LOG.info("%s", self.report.sentences[0])

    # After the decision.

    def _watch_step(self) -> None:
        """Times the loop, and tries the plans again once its steps are slower, or the machine is quiet again."""
        clock, marks = self._clock, self._marks
        self._num_since += 1
        marks.append((clock.mark(), None))
        while len(marks) > 1 and clock.is_past(marks[1][0]):
            earlier, _ = marks.popleft()
            self._watched.append(clock.ms_between(earlier, marks[0][0]))
        if len(self._watched) < _WINDOW:
            return
        median, self._watched = statistics.median(self._watched), []
        why = ""
        if median > self._limit_ms:
            why = f"{_WINDOW} steps in a row took {median:.2f} ms, more than {self._limit_ms:.2f}"
        elif self._was_loaded:
            why = "other processes used the CPU during the last one"
        if why and self._num_since >= _RETRIAL_STEPS << (self._number - 1) and not self._attachment.is_busy:
            self._try_again(why)

    def _try_again(self, why: str) -> None:
        """Opens the lanes of the candidates that were not excluded, and begins a new trial."""
        _LOG.info("plans are tried again: %s", why)
        self._attachment.switch_to(None)
        if self._winner is None:
            self._attachment.take_modules()
        self._winner, self.decision, self._why = None, None, why
        self._number += 1
        self._leave()
        before, self._turns = self._turns, self._new_turns()
        self._reference = self._last_key = None
        for number, candidate in enumerate(self._candidates, 1):
            reason = before.candidates[number].exclusion
            try:
                if reason is None:
                    candidate.placed = self._session.open_lanes(candidate)
            except MosaicError as error:
                reason = f"its lanes could not be opened: {error}"
            self._turns.candidates[number].exclusion = reason
        self._phase = "waiting"

    def _give_up(self, reason: str) -> None:
        assert self._visit is not None
        self._exclude(self._visit.candidate, reason)
        self._is_leaving = True

    def _exclude(self, number: int, reason: str) -> None:
        candidate = self._turns.candidates[number]
        candidate.exclusion = reason
        _LOG.warning("the trial goes on without %s: %s", candidate.name, reason)


# The same numbers.


def sample_step(run: Callable[[], Any]) -> tuple[torch.Tensor, ...]:
    """Runs a model once, forward and backward of the sum of its results; returns the results."""
    with torch.enable_grad():
        results = tensors_in(run())
        outputs = [tensor for tensor in results if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return tuple(results)


class SampleComparison:
    """Compares losses and gradients of the sample's step with those of the plain loop; nothing trains.

    The plain loop runs twice, the second time with half of the threads. A candidate may differ by ten times as much.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any], sample: Any, subjects: Sequence[Subject]) -> None:
        self._model = model
        self._run = run
        self._sample = sample
        self._subjects = subjects
        self._expected = self._numbers()
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // 2))
        try:
            noise = max((error for _, error in self._errors(self._numbers())), default=0.0)
        finally:
            torch.set_num_threads(threads)
        coarsest = max((torch.finfo(of.dtype).eps for of in self._expected.values()), default=0.0)
        self._limit = max(10 * noise, math.sqrt(coarsest)) if math.isfinite(noise) else math.inf

    def difference(self) -> str | None:
        """Runs the step twice and returns how its numbers differ from the plain loop's; None if they do not.

        The first call of a module is made in place, and the second one on its lane.
        """
        for _ in range(2):
            name, error = max(self._errors(self._numbers()), key=lambda pair: pair[1], default=("", 0.0))
            if not error <= self._limit:
                return f"on the sample its {name} differs from the plain loop's by {error:.1e} of its size"
        return None

    def _numbers(self) -> dict[str, torch.Tensor]:
        with preserved(self._model, self._sample, alone=self._subjects):
            # results may be views of what is restored
            numbers = {f"result {index}": each.detach().clone() for index, each in enumerate(sample_step(self._run))}
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    numbers[f"gradient of {name}"] = parameter.grad.detach()
        return {name: t for name, t in numbers.items() if t.is_floating_point() and t.layout is torch.strided}

    def _errors(self, numbers: Mapping[str, torch.Tensor]) -> list[tuple[str, float]]:
        if numbers.keys() != self._expected.keys():
            return [(sorted(numbers.keys() ^ self._expected.keys())[0], math.inf)]
        largest = max((_norm(tensor) for tensor in self._expected.values()), default=0.0)
        return [
            (name, _distance(numbers[name], expected) / max(_norm(expected), 1e-3 * largest, 1e-30))
            for name, expected in self._expected.items()
        ]


def _distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference; infinite where the shapes differ, or one has NaN or infinities of its own."""
    if tensor.shape != expected.shape:
        return math.inf
    is_same = (tensor == expected) | (tensor.isnan() & expected.isnan())
    norm = float(torch.linalg.vector_norm((tensor.double() - expected.double()).masked_fill(is_same, 0.0)))
    return norm if math.isfinite(norm) else math.inf


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)))


class LoopClock:
    """Marks the present end of the loop's work: by timed events on the caller's stream, or by the processor's clock.

    The time between two events is the device's, or the launching thread's if that is slower.
    """

    def __init__(self, api: StreamApi | None) -> None:
        self._api = api  # None on the host, where launched work is done at a mark

    def mark(self) -> Any:
        if self._api is None:
            return time.perf_counter_ns()
        event = self._api.new_event(timing=True)
        event.record(self._api.current_stream())
        return event

    def is_past(self, mark: Any) -> bool:
        return self._api is None or bool(mark.query())

    def ms_between(self, earlier: Any, later: Any) -> float:
        if self._api is None:
            return float(later - earlier) / 1e6
        earlier.synchronize()
        later.synchronize()
        return float(earlier.elapsed_time(later))

    def settle(self) -> None:
        if self._api is not None:
            self._api.synchronize()
