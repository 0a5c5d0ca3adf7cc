"""Trying plans on the user's own loop: turns change at the loop's step boundaries, and only when nothing is in flight.

The race decides (``trial_race``), the watch notices later changes (``trial_drift``); here both are put into the loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.trial.drift import DriftWatch
from mosaic.engine.trial.plans import measured_of, shape_of, solve_again
from mosaic.engine.trial.setup import Candidate, Runner, TrialSetup
from mosaic.engine.trial_race import Measured, Race, Verdict, Visit
from mosaic.errors import ModuleContractError, MosaicError

_LOG = logging.getLogger("mosaic")
_MOST_BUSY = 5
_MOST_ERRORS = 2
_TENANT_STEPS = 2000
_LAUNCH_BOUND = 0.3
_ROUNDS_BEFORE_CAPTURE = 2


@dataclass(slots=True)
class _Step:
    """What was seen since the last boundary."""

    key: list[Hashable] = field(default_factory=list)
    spoiled: bool = False


class Trial:
    """The trials of one colocated model, from its first step to its last.

    Args:
        runner: The handle.
        setup: What to try, and how.

    Attributes:
        verdict: How the last trial ended; None before.
        measured: What it measured.
        num_trials: Trials begun.
    """

    def __init__(self, runner: Runner, setup: TrialSetup) -> None:
        self.verdict: Verdict | None = None
        self.measured: tuple[Measured, ...] = ()
        self.num_trials = 0
        self._runner = runner
        self._setup = setup
        self._phase: Literal["waiting", "racing", "watching", "over"] = "waiting"
        self._candidates = [Candidate(plan, graphs, setup.cost) for plan in setup.plans for graphs in setup.graphs]
        self._num_first = len(self._candidates)
        self._race = Race(setup.settings)
        self._visit: Visit | None = None
        self._winner: Candidate | None = None
        self._watch: DriftWatch | None = None
        self._marks: deque[tuple[Any, Hashable]] = deque()
        self._step = _Step()
        self._launched = 0
        self._busy = 0
        self._reference: Hashable = None
        self._last_key: Hashable = None
        self._leaving = False
        self._was_busy = False
        self._why = "the loop begins"
        self._steps_since = 0
        self._replans_left = 0
        self._replanned_from: Candidate | None = None
        self._failed_before = 0
        if setup.opens_ahead:
            try:
                for candidate in self._candidates:
                    candidate.placed = setup.open(candidate.plan, candidate.graphs, False)
            except BaseException:
                self.stop()
                raise

    # What the handle tells.

    @property
    def is_running(self) -> bool:
        """Whether it is not decided yet what runs."""
        return self._phase in ("waiting", "racing")

    def boundary(self) -> None:
        """A step of the loop begins here: nothing that the lanes were given before is unordered."""
        if self._phase == "over":
            return
        if not self._runner.enabled or torch._C._current_graph_task_id() != -1 or on_lane():
            self._step.spoiled = True  # a step inside of disabled(), or an optimizer that steps inside of backward
            return
        step, self._step = self._step, _Step()
        key: Hashable = None if step.spoiled else tuple(step.key)
        if self._phase == "waiting":
            if self._setup.turn.take(self):
                self._begin()
        elif self._phase == "racing":
            self._race_step(key)
        else:
            self._watch_step(key)

    def before_call(self, shapes: Hashable) -> None:
        """The whole model is called."""
        if len(self._step.key) < 64:
            self._step.key.append(shapes)
        if self._phase == "racing":
            self._look_for_failed_backward()
            self._was_busy = self._is_busy()
            if self._leaving and not self._was_busy:
                self._end_visit()

    def start_over(self, why: str) -> None:
        """What was measured does not count: the loop is another one now."""
        if self._phase in ("racing", "watching"):
            self._restart(why)

    def spoil(self) -> None:
        """The present step's time cannot be compared with others."""
        self._step.spoiled = True

    def note_error(self, error: BaseException) -> None:
        """The model's call raised: the trial goes on, without a plan whose fault it is, or that fails again."""
        self.spoil()
        candidate = self._present()
        if candidate is None or not isinstance(error, Exception):
            return
        if not self._was_busy and candidate.placed is not None:
            candidate.placed.forget_calls()
        candidate.errors += 1
        own = isinstance(error, (ModuleContractError, torch.OutOfMemoryError, MemoryError))
        if own or candidate.errors >= _MOST_ERRORS:
            self._give_up(
                f"{type(error).__name__} was raised under it: {str(error).splitlines()[0] if str(error) else ''}"
            )

    def stop(self) -> None:
        """Ends everything; the lanes of all candidates are closed."""
        self._phase = "over"
        self._setup.turn.give(self)
        for candidate in self._candidates:
            candidate.close()

    def sentences(self) -> tuple[str, ...]:
        """Says how far it is, or how it ended, and what was measured."""
        if self._phase == "waiting" and self.verdict is None:
            return (f"trial: not begun; {len(self._candidates)} plans will be tried in the loop's next steps",)
        if self.is_running:
            head = f"trial: step {self._race.num_steps} of {self._setup.settings.max_steps} at most ({self._why})"
            return (head, *(one.sentence() for one in self._race.report(None)))
        assert self.verdict is not None
        which = f"trial {self.num_trials}" if self.num_trials > 1 else "trial"
        taken = f"{self._race.num_steps} steps, {self._race.lost_ms:.1f} ms lost"
        head = f"{which} ({self._why}): {self.verdict.reason} ({taken})"
        return (head, *(one.sentence() for one in self.measured))

    def metrics(self) -> dict[str, float]:
        """Returns what was measured as flat figures."""
        found = self.measured if not self.is_running else self._race.report(None)
        times = {f"trial_ms/{one.name}": one.median_ms for one in found if one.median_ms is not None}
        return {
            "trials": float(self.num_trials),
            "trial_steps": float(self._race.num_steps),
            "trial_lost_ms": self._race.lost_ms,
            **times,
        }

    # The race.

    def _begin(self) -> None:
        self.num_trials += 1
        self._phase = "racing"
        self._race = Race(self._setup.settings)
        self._reference = self._last_key = None
        self._replans_left = self._setup.settings.max_replans if self._setup.cost is not None else 0
        self._replanned_from = None
        for candidate in self._candidates:
            candidate.errors = 0
            self._race.add(candidate.name)
        self._runner.switch_to(None)
        try:
            self._runner.take_modules(track=not self._setup.opens_ahead)
        except ValueError as error:
            self._decide(Verdict(winner=0, reason=f"no plan could be tried: {error}"))
            return
        self._advance()

    def _race_step(self, key: Hashable) -> None:
        assert self._visit is not None
        self._look_for_failed_backward()
        self._marks.append((self._setup.clock.mark(), key))
        self._read(wait=False)
        self._launched += 1
        if self._launched >= self._visit.num_steps or self._race.is_cut or self._leaving:
            if not self._is_busy():
                self._end_visit()
                return
            self._busy += 1
            if self._busy == _MOST_BUSY and self._visit.entry:
                self._give_up("a backward is pending at every step")
            elif self._busy == _MOST_BUSY:
                self._decide(
                    Verdict(winner=0, reason="a backward is pending at every step, so nothing can be switched")
                )

    def _end_visit(self) -> None:
        self._busy, self._leaving = 0, False
        self._setup.clock.settle()
        self._read(wait=True)
        self._advance()

    def _advance(self) -> None:
        """Gives the next one its turn; what is prepared for that is no part of any step's time."""
        self._marks.clear()
        clock, before = self._setup.clock, self._setup.clock.mark()
        while True:
            if self._race.is_round_over and self._race.num_rounds >= _ROUNDS_BEFORE_CAPTURE:
                self._add_captured()
            if self._race.is_round_over and self._replans_left and not self._race.is_over_budget:
                self._replan()
            found = self._race.next_visit()
            if isinstance(found, Verdict):
                if not self._add_captured():
                    break
            elif self._enter(found.entry):
                break
        begun = clock.mark()
        clock.settle()
        self._race.lose(clock.ms_between(before, begun))
        if isinstance(found, Verdict):
            self._decide(found)
            return
        self._visit, self._launched = found, 0
        self._marks.append((begun, None))

    def _enter(self, entry: int) -> bool:
        """Lets the model run in one of the ways; returns False if that cannot be had."""
        if entry == 0:
            self._runner.switch_to(None)
            return True
        candidate = self._candidates[entry - 1]
        try:
            if candidate.placed is None:
                candidate.placed = self._setup.open(candidate.plan, candidate.graphs, self.num_trials > 1)
        except MosaicError as error:
            self._race.drop(entry, f"its lanes could not be opened: {error}")
            return False
        self._failed_before = candidate.placed.executor.num_failed
        self._runner.switch_to(candidate.placed)
        return True

    def _read(self, *, wait: bool) -> None:
        """Hands the race the times that are known by now, or all of them."""
        clock = self._setup.clock
        while len(self._marks) > 1 and (wait or clock.is_past(self._marks[1][0])):
            earlier, _ = self._marks.popleft()
            later, key = self._marks[0]
            if not self._race.entries[0].samples:  # what a usual step of this loop is: the first kind seen twice
                self._reference, self._last_key = self._last_key, key
            took = clock.ms_between(earlier, later)
            self._race.note(took if key is not None and key == self._reference else None)

    def _best_tried(self) -> Candidate | None:
        """Returns the plan whose measured steps were the shortest so far."""
        pairs = zip(self._race.entries[1:], self._candidates, strict=True)
        tried = [(entry.median_ms, one) for entry, one in pairs if entry.samples and not entry.is_counted_out]
        return min(tried, key=lambda pair: pair[0])[1] if tried else None

    def _add_captured(self) -> bool:
        """Lets the best plan take part as CUDA graphs, too, where launching takes long; returns whether it does now.

        One plan only, and once the others have had the turns that they need to win: capturing takes as long as some
        ten steps, of the few that a trial may lose.
        """
        best, share = self._best_tried(), self._setup.launch_share()
        if best is None or share <= _LAUNCH_BOUND or any(one.graphs for one in self._candidates):
            return False
        if not self._race.has_room:
            return False
        _LOG.info("launching takes %.2f of the modules' time on the device: CUDA graphs are tried, too", share)
        self._candidates.append(Candidate(best.plan, True, best.cost))
        self._race.add(self._candidates[-1].name)
        return True

    def _replan(self) -> None:
        """Puts what the best plan so far was measured to take into the cost model, and solves again."""
        self._replans_left -= 1
        best = self._best_tried()
        if best is None or best is self._replanned_from or best.cost is None or best.placed is None:
            return
        if best.plan.search.seconds * 1e3 > self._race.budget_ms - self._race.lost_ms:  # it may take as long again
            return
        self._replanned_from = best
        executor = best.placed.executor
        measured = measured_of(executor.spans(executor.origin_ns))
        try:
            found = solve_again(best.plan, measured, self._runner.graph, best.cost)
        except MosaicError as error:
            _LOG.info("the plan was not solved again with measured times: %s", error)
            return
        if found is None or shape_of(found[0]) in {shape_of(one.plan) for one in self._candidates}:
            return
        self._candidates.append(Candidate(found[0], best.graphs, found[1]))
        self._race.add(f"{self._candidates[-1].name} (solved again with measured times)")

    def _decide(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.measured = self._race.report(verdict)
        self._winner = self._candidates[verdict.winner - 1] if verdict.winner else None
        self._phase = "watching"
        self._visit = None
        self._steps_since = 0
        self._setup.turn.give(self)
        self._runner.switch_to(self._winner.placed if self._winner is not None else None)
        for candidate in self._candidates:
            if candidate is not self._winner:
                candidate.close()
        if self._winner is None:
            self._runner.release_modules()
        samples = self._race.entries[verdict.winner].samples
        self._watch = DriftWatch(samples, self._reference, self._setup.settings)
        self._marks.clear()
        for line in self.sentences():
            _LOG.info(line)

    # Afterwards.

    def _watch_step(self, key: Hashable) -> None:
        clock, watch = self._setup.clock, self._watch
        assert watch is not None
        self._steps_since += 1
        self._marks.append((clock.mark(), key))
        changed = watch.note_shapes(key) if key is not None else None
        while len(self._marks) > 1 and clock.is_past(self._marks[1][0]):
            earlier, _ = self._marks.popleft()
            later, seen = self._marks[0]
            if seen == watch.shapes:
                changed = watch.note(clock.ms_between(earlier, later)) or changed
        if self._setup.tenants is not None and self._steps_since % _TENANT_STEPS == 0:
            changed = watch.note_tenants(self._setup.tenants()) or changed
        if changed is not None and self._steps_since >= self._setup.settings.retrial_steps << (self.num_trials - 1):
            self._try_again(changed)

    def _try_again(self, why: str) -> None:
        """Begins a new trial at the next boundary at which it is this model's turn and nothing is in flight."""
        if not self._is_busy():
            _LOG.info("plans are tried again: %s", why)
            self._restart(why)

    def _restart(self, why: str) -> None:
        self._why = why
        self._phase = "waiting"
        self._visit = None
        self._setup.turn.give(self)
        self._runner.switch_to(None)
        for candidate in self._candidates:  # opened anew, for the shapes that the loop has then
            candidate.close()
        del self._candidates[self._num_first :]
        if self._winner is not None and self._winner not in self._candidates:
            self._candidates.append(self._winner)
        self._winner = None

    # Parts.

    def _present(self) -> Candidate | None:
        """Returns whose turn it is, if it is a plan's."""
        if self._phase != "racing" or self._visit is None or self._visit.entry == 0:
            return None
        return self._candidates[self._visit.entry - 1]

    def _is_busy(self) -> bool:
        placed = self._present() or self._winner
        if placed is not None and placed.placed is not None and placed.placed.is_in_flight:
            return True
        return self._runner.has_pending

    def _look_for_failed_backward(self) -> None:
        candidate = self._present()
        if candidate is None or candidate.placed is None:
            return
        failed = candidate.placed.executor.num_failed
        if failed > self._failed_before:
            self._failed_before = failed
            self.note_error(RuntimeError("a backward failed"))

    def _give_up(self, reason: str) -> None:
        assert self._visit is not None
        self._race.drop(self._visit.entry, reason)
        self._leaving = True
        _LOG.warning("the trial goes on without %s: %s", self._race.entries[self._visit.entry].name, reason)
