"""Trying plans on the user's own loop: turns change at the loop's step boundaries, and only when nothing is in flight.

The race decides (``race``), the watch notices later changes (``drift``); here both are put into the loop.
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
from mosaic.engine.trial.lineup import Lineup
from mosaic.engine.trial.race import Decision, Race, Turn
from mosaic.engine.trial.report import Standing, TrialReport
from mosaic.engine.trial.setup import Runner, TrialSetup, TriedPlan
from mosaic.errors import ModuleContractError, MosaicError

_LOG = logging.getLogger("mosaic")
_MAX_BUSY = 5
_MAX_ERRORS = 2
_TENANT_STEPS = 2000
_ASIDE = "batches have other shapes than the trial's: the plain loop runs until these return, or plans are tried again"


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
        decision: How the last trial ended; None before.
        standings: What it measured.
        num_trials: Trials begun.
    """

    def __init__(self, runner: Runner, setup: TrialSetup) -> None:
        self.decision: Decision | None = None
        self.standings: tuple[Standing, ...] = ()
        self.num_trials = 0
        self._runner = runner
        self._setup = setup
        self._phase: Literal["waiting", "racing", "watching", "over"] = "waiting"
        self._lineup = Lineup(setup)
        self._turn: Turn | None = None
        self._winner: TriedPlan | None = None
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
        self._failed_before = 0
        self._is_aside = False

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
                self._end_turn()

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
        if own or candidate.errors >= _MAX_ERRORS:
            self._give_up(
                f"{type(error).__name__} was raised under it: {str(error).splitlines()[0] if str(error) else ''}"
            )

    def stop(self) -> None:
        """Ends everything; the lanes of all candidates are closed."""
        self._phase = "over"
        self._setup.turn.give(self)
        self._lineup.close()

    @property
    def _race(self) -> Race:
        return self._lineup.race

    @property
    def report(self) -> TrialReport:
        """How far it is, or how it ended, and what was measured."""
        race, standings = self._race, self.standings
        if self._phase == "waiting" and self.decision is None:
            head = f"trial: not begun; {len(self._lineup.plans)} plans will be tried in the loop's next steps"
            return TrialReport.of(head, (), num_trials=0, num_steps=0, lost_ms=0.0)
        if self.is_running:
            head = f"trial: step {race.num_steps} of {self._setup.settings.max_steps} at most ({self._why})"
            standings = race.standings(None)
        else:
            assert self.decision is not None
            which = f"trial {self.num_trials}" if self.num_trials > 1 else "trial"
            taken = f"{race.num_steps} steps, {race.lost_ms:.1f} ms lost"
            head = f"{which} ({self._why}): {self.decision.reason} ({taken})"
            head += f"; {_ASIDE}" if self._is_aside else ""
        return TrialReport.of(
            head, standings, num_trials=self.num_trials, num_steps=race.num_steps, lost_ms=race.lost_ms
        )

    # The race.

    def _begin(self) -> None:
        self.num_trials += 1
        self._phase = "racing"
        self._lineup.begin_race()
        self._reference = self._last_key = None
        self._runner.switch_to(None)
        try:
            self._runner.take_modules(track=not self._setup.opens_ahead)
        except ValueError as error:
            self._decide(Decision(winner=0, reason=f"no plan could be tried: {error}"))
            return
        self._advance()

    def _race_step(self, key: Hashable) -> None:
        assert self._turn is not None
        self._look_for_failed_backward()
        self._marks.append((self._setup.clock.mark(), key))
        self._read(wait=False)
        self._launched += 1
        if self._launched >= self._turn.num_steps or self._race.is_cut or self._leaving:
            if not self._is_busy():
                self._end_turn()
                return
            self._busy += 1
            if self._busy == _MAX_BUSY and self._turn.contender:
                self._give_up("a backward is pending at every step")
            elif self._busy == _MAX_BUSY:
                self._decide(
                    Decision(winner=0, reason="a backward is pending at every step, so nothing can be switched")
                )

    def _end_turn(self) -> None:
        self._busy, self._leaving = 0, False
        self._setup.clock.settle()
        self._read(wait=True)
        self._advance()

    def _advance(self) -> None:
        """Gives the next one its turn; what is prepared for that is no part of any step's time."""
        self._marks.clear()
        clock, before = self._setup.clock, self._setup.clock.mark()
        while isinstance(found := self._lineup.next_turn(self._runner.graph), Turn):
            if self._enter(found.contender):
                break
        begun = clock.mark()
        clock.settle()
        self._race.lose(clock.ms_between(before, begun))
        if isinstance(found, Decision):
            self._decide(found)
            return
        self._turn, self._launched = found, 0
        self._marks.append((begun, None))

    def _enter(self, number: int) -> bool:
        """Lets the model run in one of the ways; returns False if that cannot be had."""
        candidate = self._lineup.plan_of(number)
        if candidate is None:
            self._runner.switch_to(None)
            return True
        try:
            if candidate.placed is None:
                candidate.placed = self._setup.open(candidate, self.num_trials > 1)
        except MosaicError as error:
            self._race.drop(number, f"its lanes could not be opened: {error}")
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
            if not self._race.contenders[0].samples:  # what a usual step of this loop is: the first kind seen twice
                self._reference, self._last_key = self._last_key, key
            took = clock.ms_between(earlier, later)
            self._race.note(took if key is not None and key == self._reference else None)

    def _decide(self, decision: Decision) -> None:
        self.decision = decision
        self.standings = self._race.standings(decision)
        self._winner = self._lineup.plan_of(decision.winner)
        self._phase = "watching"
        self._is_aside = False
        self._turn = None
        self._steps_since = 0
        self._setup.turn.give(self)
        self._runner.switch_to(self._winner.placed if self._winner is not None else None)
        self._lineup.close(but=self._winner)
        if self._winner is None:
            self._runner.release_modules()
        samples = self._race.contenders[decision.winner].samples
        self._watch = DriftWatch(samples, self._reference, self._setup.settings)
        self._marks.clear()
        for line in self.report.sentences:
            _LOG.info(line)

    # Afterwards.

    def _watch_step(self, key: Hashable) -> None:
        clock, watch = self._setup.clock, self._watch
        assert watch is not None
        self._steps_since += 1
        self._marks.append((clock.mark(), key))
        changed = watch.note_shapes(key) if key is not None else None
        self._follow_shapes(watch)
        while len(self._marks) > 1 and clock.is_past(self._marks[1][0]):
            earlier, _ = self._marks.popleft()
            later, seen = self._marks[0]
            if seen == watch.shapes:
                changed = watch.note(clock.ms_between(earlier, later)) or changed
        if self._setup.tenants is not None and self._steps_since % _TENANT_STEPS == 0:
            changed = watch.note_tenants(self._setup.tenants()) or changed
        if changed is not None and self._steps_since >= self._setup.settings.retrial_steps << (self.num_trials - 1):
            self._try_again(changed)

    def _follow_shapes(self, watch: DriftWatch) -> None:
        """Runs the plain loop while batches keep other shapes than the trial's: no plan was found faster for them."""
        if self._winner is None or watch.has_other_shapes == self._is_aside or self._is_busy():
            return
        self._is_aside = watch.has_other_shapes
        self._runner.switch_to(None if self._is_aside else self._winner.placed)
        _LOG.info(_ASIDE if self._is_aside else "batches have the trial's shapes again: its plan runs")

    def _try_again(self, why: str) -> None:
        """Begins a new trial at the next boundary at which it is this model's turn and nothing is in flight."""
        if not self._is_busy():
            _LOG.info("plans are tried again: %s", why)
            self._restart(why)

    def _restart(self, why: str) -> None:
        self._why = why
        self._phase = "waiting"
        self._turn = None
        self._setup.turn.give(self)
        self._runner.switch_to(None)
        self._lineup.reset(self._winner)
        self._winner = None

    # Parts.

    def _present(self) -> TriedPlan | None:
        """Returns whose turn it is, if it is a plan's."""
        if self._phase != "racing" or self._turn is None:
            return None
        return self._lineup.plan_of(self._turn.contender)

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
        assert self._turn is not None
        self._race.drop(self._turn.contender, reason)
        self._leaving = True
        _LOG.warning("the trial goes on without %s: %s", self._race.contenders[self._turn.contender].name, reason)
