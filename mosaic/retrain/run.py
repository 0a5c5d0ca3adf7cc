"""``mosaic retrain run``: runs the missing phases of a folder's day; it can start at any time.

The launcher holds the lock, starts the training processes, and decides; it loads no torch. Each phase ends with an
atomically written file, so a killed run resumes with the first phase without its file.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mosaic.artifact import load, save, write_bytes
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import MosaicError
from mosaic.retrain import hooks, versions
from mosaic.retrain.folder import DayFolder, DayState, Folder, Phase, Start, utc_text
from mosaic.retrain.frozen import ROW, frozen_rows, looked_at, renewed
from mosaic.retrain.gate import (
    Contest,
    DayScores,
    ModelFacts,
    decide,
    renewal,
    resolution,
    resolution_finding,
    validity_findings,
)
from mosaic.retrain.intake.arrivals import Arrivals, archive
from mosaic.retrain.intake.data_check import DataCheck
from mosaic.retrain.lock import boot_id, held
from mosaic.retrain.recipe import Recipe, read_recipe, seconds_of
from mosaic.retrain.records import GateResult, Outcome
from mosaic.retrain.reporting import is_told, write_report
from mosaic.retrain.versions import Card
from mosaic.retrain.workers import Ended, Workers
from mosaic.train.exits import DONE, FAILED, INTERRUPTED
from mosaic.train.exits import QUARANTINED as REFUSED
from mosaic.train.records import NEW_WEIGHTS, Environment, Trained

_LOG = logging.getLogger(__name__)
CODES: dict[Outcome, int] = {
    "promoted": DONE,
    "held": DONE,
    "refused": REFUSED,
    "quarantined": REFUSED,
    "failed": FAILED,
    "interrupted": INTERRUPTED,
}
"""Exit codes by outcome."""

MAX_UNTOLD = 7
"""Last days whose missing reports are written."""
Say = Callable[[str], None]
"""Prints a line."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The time in UTC; a rehearsal replaces it."""

    offset: timedelta = timedelta()

    def now(self) -> datetime:
        """Returns the time."""
        return datetime.now(UTC) + self.offset


def run(root: Path, say: Say, clock: Clock | None = None) -> int:
    """Runs a folder; returns the exit code.

    Raises:
        InvalidRecipeError: The recipe is wrong.
        FolderInUseError: Another run has the folder.
        MosaicError: The folder is damaged, or its disk is full.
    """
    folder, clock = Folder(root), clock or Clock()
    recipe = read_recipe(folder.recipe)
    with held(root, utc_text(clock.now())):
        late = hooks.run_pending(folder, recipe.promote, versions.linked(folder, "champion"))
        for sentence in late:
            say(sentence)
        opens = recipe.budget.opens(clock.now())
        if opens is not None:
            say(f"the window is closed until {utc_text(opens)}; nothing was begun")
            return DONE
        for over in folder.days()[-MAX_UNTOLD:]:
            if over.state.is_over and not is_told(over):  # it was killed between its end and its report
                write_report(folder, over)
        day = _day_to_go_on_with(folder, recipe, clock)
        if day is None:
            say("there is nothing new; see `mosaic retrain status`")
            return DONE
        return _Day(folder, recipe, day, clock, say).run()


def _day_to_go_on_with(folder: Folder, recipe: Recipe, clock: Clock) -> DayFolder | None:
    """Returns the unfinished day, or a new day if data has arrived; None for nothing to do."""
    arrivals = Arrivals(folder, recipe)
    new = arrivals.new()
    for day in folder.days():  # not only the last: a day's data may come late
        if not day.state.is_over:
            if day.state.outcome != "failed" or not new:
                return day
            archive(day)  # it failed, and other data arrived: the new day uses its data too
    new = arrivals.new()
    if not new:
        return None
    day = folder.day(max(new))
    if day.has_begun:  # it was quarantined, and a person released its data
        archive(day)
    return _prepare(folder, recipe, day, new, arrivals.replay(), clock)


def _prepare(
    folder: Folder, recipe: Recipe, day: DayFolder, new: tuple[str, ...], replay: tuple[str, ...], clock: Clock
) -> DayFolder:
    """Creates a day's folder; the day begins with its state."""
    write_bytes(folder.recipe.read_bytes(), day.recipe)
    now = clock.now()
    deadline = recipe.budget.deadline(now)
    state = DayState(
        day=max(new),
        phase="prepared",
        new=new,
        replay=replay,
        parent=versions.linked(folder, "champion"),
        champion=versions.linked(folder, "champion"),
        anchor=versions.linked(folder, "anchor"),
        version=versions.next_name(folder),
        began=utc_text(now),
        deadline=None if deadline is None else utc_text(deadline),
    )
    day.set(state)
    return day


class _Day:
    """One day, from its current phase."""

    def __init__(self, folder: Folder, recipe: Recipe, day: DayFolder, clock: Clock, say: Say) -> None:
        self._folder = folder
        self._recipe = recipe
        self._day = day
        self._clock = clock
        self._say = say
        self._workers = Workers(folder, day, recipe, say)

    def run(self) -> int:
        """Runs the remaining phases; returns the exit code."""
        self._reopen()
        try:
            self._train_and_score()
            if self._phase() == "evaluated":
                self._decide()
            if self._state.phase == "decided":
                self._finish()
        except (MosaicError, OSError) as error:
            self._end("failed", str(error))
        outcome = self._state.outcome
        assert outcome is not None
        write_report(self._folder, self._day)
        self._say(f"{self._state.day}: {outcome}: {self._state.reason}")
        self._say(f"the report is {self._day.page}")
        return CODES[outcome]

    @property
    def _state(self) -> DayState:
        return self._day.state

    def _set(self, **changes: object) -> None:
        self._day.set(self._state, **changes)

    def _end(self, outcome: Outcome, reason: str) -> None:
        self._set(outcome=outcome, reason=reason, ended=utc_text(self._clock.now()))

    def _remember(self, sentences: tuple[str, ...]) -> None:
        """Adds messages to the report, each once, even after a kill."""
        messages = self._state.messages
        self._set(messages=(*messages, *(sentence for sentence in sentences if sentence not in messages)))

    def _reopen(self) -> None:
        """Resumes where the last run of this day ended; a new night has a new window."""
        state = self._state
        starts = state.starts
        if starts and not starts[-1].ended:
            cause = "launcher killed" if starts[-1].boot == boot_id() else "new boot"
            starts = (*starts[:-1], replace(starts[-1], ended=cause))
        deadline = self._recipe.budget.deadline(self._clock.now())
        self._set(
            starts=starts,
            deadline=None if deadline is None else utc_text(deadline),
            outcome=None if not state.is_over else state.outcome,
            reason="",
        )
        self._follow_links()

    def _follow_links(self) -> None:
        """Follows links that a person changed since the day began: the gate uses the versions in force."""
        folder, state = self._folder, self._state
        champion, anchor = versions.linked(folder, "champion"), versions.linked(folder, "anchor")
        if state.version == champion or (champion, anchor) == (state.champion, state.anchor):
            return
        if versions.is_overruled(folder, state.version):
            return
        for path in (self._day.scores, self._day.gate):
            path.unlink(missing_ok=True)
        phase: Phase = "trained" if self._day.trained.is_file() else state.phase
        self._set(champion=champion, anchor=anchor, phase=phase)

    def _train_and_score(self) -> None:
        """Runs the workers until the day is evaluated, or ends without an evaluation."""
        tries = stuck = 0
        while (phase := self._phase()) in ("prepared", "training", "trained"):
            from_step = self._workers.step
            start = Start(at=utc_text(self._clock.now()), boot=boot_id(), from_step=from_step)
            self._set(starts=(*self._state.starts, start))
            total_s = self._seconds_left()
            train_s = (
                None if total_s is None else max(0.0, total_s - seconds_of(self._recipe.budget.judging, "judging"))
            )
            ended = self._workers.run(phase, train_s, total_s)
            self._set(starts=(*self._state.starts[:-1], replace(start, ended=ended.how)))
            if ended.outcome is not None:
                if ended.outcome == "quarantined":
                    self._quarantine(ended)
                self._end(ended.outcome, ended.reason)
                return
            if (self._phase(), self._workers.step) != (phase, from_step):
                stuck = 0
            else:
                stuck += 1
            tries += ended.crashed
            if stuck > 1 or tries > self._recipe.budget.restarts:
                where = f"at step {from_step}" if stuck > 1 else f"{tries} times"
                self._end("failed", f"training ended early again ({ended.how}), {where}: {ended.reason}".rstrip(": "))
                return
            if ended.crashed:
                self._say(f"training ended early ({ended.how}); it goes on from step {self._workers.step}")

    def _seconds_left(self) -> float | None:
        """Returns the seconds until the device must be released; None for no limit."""
        deadline = self._state.deadline
        if deadline is None:
            return None
        return max(0.0, (datetime.fromisoformat(deadline) - self._clock.now()).total_seconds())

    def _phase(self) -> Phase:
        """Reads the phase from the day's files, and records it."""
        day, phase = self._day, self._state.phase
        if phase not in ("prepared", "training", "trained"):
            return phase
        if day.scores.is_file():
            phase = "evaluated"
        elif day.trained.is_file():
            phase = "trained"
        elif day.data_check.is_file() and not load(DataCheck, day.data_check).quarantine:
            phase = "training"
        self._set(phase=phase)
        return phase

    def _quarantine(self, ended: Ended) -> None:
        self._folder.quarantine.mkdir(exist_ok=True)
        for day in self._state.new:
            save({"day": day, "reason": ended.reason}, self._folder.quarantine / f"{day}.json")
        self._folder.note("quarantined", day=self._state.day, new=list(self._state.new), reason=ended.reason)

    def _decide(self) -> None:
        """Adds the version, and runs the gate; a refused version stays, because a person may promote it."""
        state, gate = self._state, self._recipe.gate
        assert state.version is not None
        scores = load(DayScores, self._day.scores)
        versions.add(self._folder, self._card(scores), self._day.model, self._program_file)
        frozen = frozen_rows(self._folder, self._recipe.sources.frozen)
        contest = Contest(
            day=state.day,
            challenger=state.version,
            champion=state.champion,
            anchor=state.anchor,
            findings=validity_findings(load(ModelFacts, self._day.facts), gate),
            refused_before=_refused_before(self._folder, state.day),
            looks=frozen.looks,
            folder=shlex.quote(str(self._folder.path.resolve())),
        )
        result = decide(scores, contest, gate)
        save(result, self._day.gate)
        challenger, reference = scores.find(state.version, "frozen"), scores.find(state.champion, "frozen")
        # two good models estimate the resolution of the rows
        if challenger is not None and reference is not None and result.passes:
            finding = resolution_finding(resolution(challenger, gate, last=reference), gate)
            self._remember(() if finding.passed else (finding.sentence,))
        save(looked_at(frozen, state.day), self._folder.frozen)
        self._set(phase="decided")

    def _finish(self) -> None:
        """Applies the gate's result; a repeat after a kill changes nothing."""
        state, result = self._state, load(GateResult, self._day.gate)
        assert state.version is not None
        if not result.passes:
            self._folder.note("refused", day=state.day, version=state.version, reason=result.reason)
            self._end("refused", result.reason)
        elif versions.is_overruled(self._folder, state.version):
            self._end("held", f"{result.reason} It was promoted, and a person has changed the champion since.")
        elif self._folder.hold.exists() and versions.linked(self._folder, "champion") != state.version:
            self._end("held", f"{result.reason} It was not promoted, for a person said hold.")
        else:
            hooks.remember(self._folder, self._recipe.promote, state.version, state.day)
            versions.promote(self._folder, state.version, day=state.day, by="gate")
            self._renew_frozen_rows(state.version)
            self._end("promoted", result.reason)
            write_report(self._folder, self._day)  # hooks may read it; what they say is added
            self._remember(hooks.run_pending(self._folder, self._recipe.promote, state.version))
        versions.drop_old(self._folder, self._recipe.promote.keep_versions)

    def _renew_frozen_rows(self, version: str) -> None:
        """Replaces worn frozen rows by some of the day's fresh rows, if the recipe has ``renew_rows``."""
        if not self._recipe.gate.renew_rows:
            return
        scores, rows = load(DayScores, self._day.scores), frozen_rows(self._folder, self._recipe.sources.frozen)
        frozen, fresh = scores.find(version, "frozen"), scores.find(version, "fresh")
        if frozen is not None and fresh is not None:
            change = renewal(frozen, fresh, self._state.day, self._recipe.gate)
            names = frozen.columns[ROW], fresh.columns[ROW]
            save(renewed(rows, change, *names, self._state.day), self._folder.frozen)

    def _card(self, scores: DayScores) -> Card:
        state, trained = self._state, load(Trained, self._day.trained)
        assert state.version is not None
        environment = load(Environment, self._day.environment)
        scores_of = {kind: scores.find(state.version, kind) for kind in ("frozen", "fresh")}
        return Card(
            version=state.version,
            day=state.day,
            created=utc_text(self._clock.now()),
            parent=state.parent if trained.notes.loaded != NEW_WEIGHTS else None,
            step=trained.step,
            sha256=sha256_of(self._day.model),
            code=environment.program,
            mosaic=environment.mosaic,
            torch=environment.torch,
            values={kind: _mean(scores.value) for kind, scores in scores_of.items() if scores is not None},
        )

    @property
    def _program_file(self) -> Path:
        return self._folder.path / self._recipe.model.partition(":")[0]


def _mean(values: tuple[float | None, ...]) -> float:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else math.nan


def _refused_before(folder: Folder, today: str) -> int:
    """Returns the number of consecutive refused days before today."""
    count = 0
    for day in reversed([day for day in folder.days() if day.path.name < today]):
        if day.state.outcome != "refused":
            break
        count += 1
    return count
