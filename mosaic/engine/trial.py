"""The trial of plans in a user's own loop: turns change at its step boundaries, while no backward is pending.

``Turns`` decides, ``DriftWatch`` notices later changes, and ``SampleComparison`` excludes plans that compute something
else.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mosaic.cost import Cost
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.placing import PlacedPlan
from mosaic.errors import InfeasibleError, ModuleContractError, MosaicError, said_by
from mosaic.find.restore import preserved
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profiler import Subject
from mosaic.solver import solve
from mosaic.solver.exact import why_not_exact
from mosaic.solver.limits import SearchLimits
from mosaic.solver.task import SearchOptions
from mosaic.take_turns import PLAIN, Decision, StepClock, TrialReport, TrialSettings, Turns, Visit

if TYPE_CHECKING:
    from mosaic.backends.base import Backend
    from mosaic.backends.streams.api import StreamApi
    from mosaic.engine.attachment import Attachment
    from mosaic.engine.session import Session

_LOG = logging.getLogger("mosaic")
_EFFORT = 1.0
"""Most effort of the search for another plan."""
_MAX_BUSY = 5
"""Step boundaries in a row with a pending backward, after which a candidate is given up."""
_MAX_ERRORS = 2
_TENANT_STEPS = 2000
_MAX_REFUSALS = 200
_CALLS_WITHOUT_OPTIMIZER = 8
_STEPS_OF_ANOTHER = 8
_COMPARED_STEPS = 2
_DRIFT_WINDOW, _DRIFT_MARGIN = 20, 1.1


# The candidates.


@dataclass(slots=True)
class PlanCandidate:
    plan: Plan
    graphs: bool = False
    """True if its modules are launched as CUDA graphs."""
    sm_target: bool = False
    """True if libraries get the SM counts of its lanes."""
    is_variant: bool = False
    """True if another candidate has the same plan."""
    placed: PlacedPlan | None = None
    """Its lanes while they are open."""
    num_errors: int = 0
    """Calls of the model that raised under it."""

    @property
    def name(self) -> str:
        graphs, target = ", as CUDA graphs" if self.graphs else "", ", with SM targets" if self.sm_target else ""
        return f"{name_of(self.plan)}{graphs}{target}"

    def close(self) -> None:
        if self.placed is not None:
            self.placed.close()
            self.placed = None


def plan_shape(plan: Plan) -> Hashable:
    """Returns what decides how a plan runs: its stages, and the slots of each module."""
    return tuple(tuple((p.module, p.cells) for p in stage.placements) for stage in plan.stages)


def name_of(plan: Plan) -> str:
    """Names the modules that run side by side with their quotas, stage after stage."""
    if not plan.is_colocated:
        quotas = ", ".join(f"{p.module}:{p.quota}" for p in plan.placements)
        return f"one module after the other on lanes ({quotas})"
    return " | ".join(" + ".join(f"{p.module}:{p.quota}" for p in stage.placements) for stage in plan.stages)


def plans_to_try(best: Plan, graph: ModuleGraph, cost: Cost, *, count: int, smallest_gain: float) -> tuple[Plan, ...]:
    """Returns the best plan, the next best that have other stages, and the sequential one last; all different.

    Of each colocated stage of the best plan there is one candidate without it. Plans whose predicted speed-up is below
    ``smallest_gain`` are left out, except for the sequential one; if that leaves none, there is nothing to try.
    """
    if best.predicted_speedup < smallest_gain:
        return ()
    device, others = best.device, []
    if why_not_exact(graph, cost) is None and count > 2:
        for stage in best.stages:
            if len(stage.placements) > 1:
                with suppress(InfeasibleError):  # there is no plan without this stage
                    search = SearchOptions(limits=SearchLimits(effort=_EFFORT))
                    others.append(solve(graph, cost, device, method="exact", search=search, forbidden=[stage.names]))
    others = [plan for plan in others if plan.predicted_speedup >= smallest_gain]
    chosen: dict[Hashable, Plan] = {}
    for plan in (best, *sorted(others, key=lambda plan: plan.predicted_ms)):
        chosen.setdefault(plan_shape(plan), plan)
    plans = list(chosen.values())[: max(1, count - 1)]
    return (*plans, solve(graph, cost, device, method="sequential"))[:count]


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

    The plain loop runs twice, on the host the second time with half of the threads, which shows the rounding error
    of the model. A candidate may differ by ten times as much.

    Args:
        model: The model.
        run: Runs it on the sample.
        sample: The sample.
        subjects: Its placed modules.
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
            noise = noise if math.isfinite(noise) else math.inf  # nothing can be compared
        finally:
            torch.set_num_threads(threads)
        coarsest = max((torch.finfo(of.dtype).eps for of in self._expected.values()), default=0.0)
        self._limit = max(10 * noise, math.sqrt(coarsest))

    def difference(self) -> str | None:
        """Runs the step twice and returns how its numbers differ from the plain loop's; None if they do not.

        The first call of a module is made in place, and the second one on its lane.
        """
        for _ in range(_COMPARED_STEPS):
            name, error = max(self._errors(self._numbers()), key=lambda pair: pair[1], default=("", 0.0))
            if not error <= self._limit:
                return f"on the sample its {name} differs from the plain loop's by {error:.1e} of its size"
        return None

    def _numbers(self) -> dict[str, torch.Tensor]:
        with preserved(self._model, self._sample, alone=self._subjects, elsewhere=True):
            results = sample_step(self._run)
            numbers = {f"result {index}": tensor for index, tensor in enumerate(results)}
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    numbers[f"gradient of {name}"] = parameter.grad
            return {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in numbers.items()
                if tensor.is_floating_point() and tensor.layout is torch.strided
            }

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


# The steps of a loop.


class HostClock:
    """The processor's clock: launched work is done."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def is_past(self, mark: int) -> bool:
        return True

    def ms_between(self, earlier: int, later: int) -> float:
        return (later - earlier) / 1e6

    def settle(self) -> None:
        """Does nothing: the lanes are idle at a mark."""


class EventClock:
    """Timed events on the caller's stream, one a step.

    The time between two is the device's, or the launching thread's where that is slower; no step waits for it.
    """

    def __init__(self, api: StreamApi) -> None:
        self._api = api

    def mark(self) -> Any:
        event = self._api.new_event(timing=True)
        event.record(self._api.current_stream())
        return event

    def is_past(self, mark: Any) -> bool:
        passed: bool = mark.query()
        return passed

    def ms_between(self, earlier: Any, later: Any) -> float:
        earlier.synchronize()
        later.synchronize()
        took: float = earlier.elapsed_time(later)
        return took

    def settle(self) -> None:
        self._api.synchronize()


def clock_of(backend: Backend) -> StepClock:
    return HostClock() if backend.api is None else EventClock(backend.api)


class StepUnit:
    """Finds the optimizer steps, or the calls of the model, at which a step of the loop begins.

    A step lies between two steps of an optimizer that holds the model's parameters; with accumulation that is the
    whole cycle. Of several optimizers the first one counts, until others step and it does not. A loop without an
    optimizer, which calls the model without gradients, is counted in calls.

    Attributes:
        has_counted_calls: Whether calls of the model were counted, before the first optimizer step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._chosen: weakref.ref[Optimizer] | None = None
        self._num_others = self._num_calls = 0
        self.has_counted_calls = False
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
    of ten steps took in the trial, and above its median by 10 % at least; when as many steps in a row had one same
    other shape; or when another process has come to the device.

    Args:
        samples: Milliseconds of the trial's steps of the candidate that runs; without any, the first window.
        shapes: The shapes of the trial's batches.
        settings: Bounds.
    """

    def __init__(self, samples: Sequence[float], shapes: Hashable, settings: TrialSettings) -> None:
        self.shapes = shapes
        self._drift_steps = settings.drift_steps
        self._window: list[float] = []
        self._num_slow = self._num_others = 0
        self._other: Hashable = None
        self._tenants: frozenset[int] | None = None
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

    def note_tenants(self, processes: frozenset[int]) -> str | None:
        known, self._tenants = self._tenants, processes
        added = processes - known if known is not None else frozenset()
        return f"another process uses the device now (id {', '.join(map(str, sorted(added)))})" if added else None


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
    """The trials of one colocated model, from its first step to its last.

    Args:
        attachment: Sends the model's calls to the plan whose turn it is.
        session: The model's candidates, their lanes, and the plain loop's numbers on the sample.
        settings: Bounds.

    Attributes:
        decision: The end of the last trial; None before.
        num_trials: Trials begun.
    """

    def __init__(self, attachment: Attachment, session: Session, settings: TrialSettings) -> None:
        self.decision: Decision | None = None
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
        if self.is_running:
            head = f"trial: step {turns.num_steps} of {self._settings.max_steps} at most ({self._why})"
            return turns.report(head, None, num_trials=self.num_trials)
        assert self.decision is not None
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
        """The whole model is called."""
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
        """Ends everything and closes all lanes."""
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
        clock, watch, tenants = self._clock, self._watch, self._session.request.backend.other_processes
        assert watch is not None
        self._steps_since += 1
        self._marks.append((clock.mark(), key))
        changed = watch.note_shapes(key) if key is not None else None
        while len(self._marks) > 1 and clock.is_past(self._marks[1][0]):
            earlier, _ = self._marks.popleft()
            later, measured_key = self._marks[0]
            if measured_key == watch.shapes:
                changed = watch.note_time(clock.ms_between(earlier, later)) or changed
        if tenants is not None and self._steps_since % _TENANT_STEPS == 0:
            changed = watch.note_tenants(tenants()) or changed
        enough = self._steps_since >= self._settings.retrial_steps << (self.num_trials - 1)
        if changed is not None and enough and not self._is_busy():
            _LOG.info("plans are tried again: %s", changed)
            self.start_over(changed)

    # Parts.

    def _close_lanes(self) -> None:
        """Closes the lanes of all candidates but the winner."""
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
        return self._attachment.has_pending

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
