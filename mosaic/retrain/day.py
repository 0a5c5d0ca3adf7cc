"""``mosaic retrain run``: takes a folder's day from the phase it stands in to its end; it can start at any time.

::

    prepared  ->  training  ->  trained  ->  evaluated  ->  decided  ->  the outcome
       |             |            |             |             |
    state.json   data_check   trained.json  scores.json   gate.json, the version
                 (workers)     (workers)     (workers)     (launcher)

Each phase ends with an atomically written file, so a killed run resumes with the first phase without its file. The
launcher holds the lock, starts the training processes, and decides; it loads no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from mosaic.artifact import load, save, write_bytes
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.retrain import hooks, versions
from mosaic.retrain.folder import (
    DayFolder,
    DayState,
    Folder,
    Outcome,
    Start,
    archive,
    named_remedy,
    new_dates,
    utc_text,
)
from mosaic.retrain.gate import Contest, DayScores, GateResult, ModelFacts, decide
from mosaic.retrain.lock import held
from mosaic.retrain.recipe import Recipe, read_recipe
from mosaic.retrain.records import NEW_WEIGHTS, Trained
from mosaic.retrain.report import is_reported, write_report
from mosaic.retrain.versions import Card
from mosaic.retrain.workers import DONE, FAILED, INTERRUPTED, Workers
from mosaic.retrain.workers import QUARANTINED as REFUSED

CODES: dict[Outcome, int] = {
    "promoted": DONE,
    "held": DONE,
    "refused": REFUSED,
    "quarantined": REFUSED,
    "failed": FAILED,
    "interrupted": INTERRUPTED,
}
MAX_RESTARTS = 5
"""Restarts of crashed training within a run; two in a row without progress end it earlier."""
MAX_UNREPORTED = 7
"""Last days whose missing reports are written."""
Echo = Callable[[str], None]


def run(root: Path, echo: Echo, offset: timedelta = timedelta()) -> int:
    """Runs a folder; returns the exit code. A rehearsal adds ``offset`` to the time.

    Raises:
        InvalidRecipeError: The recipe is wrong.
        FolderInUseError: Another run has the folder.
        MosaicError: The folder is damaged, or its disk is full.
    """
    folder, now = Folder(root), datetime.now(UTC) + offset
    recipe = read_recipe(folder.recipe)
    with held(root, utc_text(now)):
        for failure in hooks.run_pending(folder, recipe.promote, versions.linked(folder, "champion")):
            echo(failure)
        if (opens := recipe.budget.opens(now)) is not None:
            echo(f"the window is closed until {utc_text(opens)}; nothing was begun")
            return DONE
        for past in folder.days()[-MAX_UNREPORTED:]:
            if past.state.is_over and not is_reported(past):  # killed between the end and the report
                write_report(folder, past)
        day = _unfinished_day(folder, recipe) or _new_day(folder, recipe, now)
        if day is None:
            echo("there is nothing new; see `mosaic retrain status`")
            return DONE
        return _Day(folder, recipe, day, offset, echo).run()


def _unfinished_day(folder: Folder, recipe: Recipe) -> DayFolder | None:
    """Returns the day to go on with; archives a failed day if newer data arrived, whose day uses its data too."""
    new = new_dates(folder, recipe)
    for day in folder.days():  # not only the last one: data may arrive late
        if not day.state.is_over:
            if day.state.outcome != "failed" or not new:
                return day
            day.drop_weights()
            archive(day)
    return None


def _new_day(folder: Folder, recipe: Recipe, now: datetime) -> DayFolder | None:
    """Creates a day's folder, which begins with its state; None without new data."""
    new = new_dates(folder, recipe)
    if not new:
        return None
    day = folder.day(max(new))
    if any(day.path.glob("*.json")):  # quarantined, and released by a person; or its state is gone
        archive(day)
    write_bytes(folder.recipe.read_bytes(), day.recipe)
    day.set(versions.first_state(folder, recipe, new, versions.next_name(folder), utc_text(now)))
    return day


class _Day:
    def __init__(self, folder: Folder, recipe: Recipe, day: DayFolder, offset: timedelta, echo: Echo) -> None:
        self._folder = folder
        self._recipe = recipe
        self._day = day
        self._offset = offset
        self._echo = echo
        self._workers = Workers(folder, day, recipe, echo)

    def run(self) -> int:
        """Runs the remaining phases; returns the exit code."""
        self._reopen()
        try:
            with named_remedy():
                self._train_and_score()  # prepared, training, trained
                if self._day.phase == "evaluated":
                    self._decide()
                if self._day.phase == "decided":
                    self._apply()
        except (MosaicError, OSError) as error:
            self._end("failed", str(error))
        outcome = self._state.outcome
        assert outcome is not None
        write_report(self._folder, self._day)
        self._echo(f"{self._state.day}: {outcome}: {self._state.reason}")
        self._echo(f"the report is {self._day.page}")
        return CODES[outcome]

    @property
    def _state(self) -> DayState:
        return self._day.state

    def _set(self, **changes: object) -> None:
        self._day.set(self._state, **changes)

    def _now(self) -> datetime:
        return datetime.now(UTC) + self._offset

    def _end(self, outcome: Outcome, reason: str) -> None:
        self._set(outcome=outcome, reason=reason, ended=utc_text(self._now()))

    def _reopen(self) -> None:
        """Resumes where the last run of this day ended; a new night has a new window.

        Links that a person changed since the day began are followed: the gate uses the versions in force.
        """
        folder, day, state = self._folder, self._day, self._state
        day.drop_unfinished()
        starts, deadline = state.starts, self._recipe.budget.deadline(self._now())
        if starts and not starts[-1].ended:
            starts = (*starts[:-1], replace(starts[-1], ended="launcher killed"))
        self._set(starts=starts, deadline=None if deadline is None else utc_text(deadline), outcome=None, reason="")
        champion, anchor = versions.linked(folder, "champion"), versions.linked(folder, "anchor")
        is_promoted = state.version == champion or versions.is_overruled(folder, state.version)
        if not is_promoted and (champion, anchor) != (state.champion, state.anchor):
            for path in (day.scores, day.gate):
                path.unlink(missing_ok=True)
            self._set(champion=champion, anchor=anchor)

    def _train_and_score(self) -> None:
        """Runs the workers until the day is evaluated, or ends without an evaluation."""
        crashes = stuck = 0
        while (phase := self._day.phase) in ("prepared", "training", "trained"):
            from_step = self._workers.step
            start = Start(at=utc_text(self._now()), from_step=from_step)
            self._set(starts=(*self._state.starts, start))
            total_s = train_s = None
            if (deadline := self._state.deadline) is not None:
                total_s = max(0.0, (datetime.fromisoformat(deadline) - self._now()).total_seconds())
                train_s = max(0.0, total_s - self._recipe.budget.judging)
            ended = self._workers.run(phase, train_s, total_s)
            self._set(starts=(*self._state.starts[:-1], replace(start, ended=ended.how)))
            if ended.outcome is not None:
                if ended.outcome == "quarantined":
                    new = self._state.new
                    for date in new:
                        save({"day": date, "reason": ended.reason}, self._folder.quarantine / f"{date}.json")
                    self._folder.note("quarantined", day=self._state.day, new=list(new), reason=ended.reason)
                self._end(ended.outcome, ended.reason)
                return
            stuck = stuck + 1 if (self._day.phase, self._workers.step) == (phase, from_step) else 0
            crashes += ended.crashed
            if stuck > 1 or crashes > MAX_RESTARTS:
                where = f"at step {from_step}" if stuck > 1 else f"{crashes} times"
                self._end("failed", f"training ended early again ({ended.how}), {where}: {ended.reason}".rstrip(": "))
                return
            if ended.crashed:
                self._echo(f"training ended early ({ended.how}); it goes on from step {self._workers.step}")

    def _decide(self) -> None:
        """Adds the version, and runs the gate; a refused version stays, because a person may promote it."""
        folder, day, state = self._folder, self._day, self._state
        scores, trained, sha256 = load(DayScores, day.scores), load(Trained, day.trained), sha256_of(day.model)
        if trained.sha256 not in ("", sha256):
            raise InvalidFileError(f"{day.model} has other bytes than training wrote")
        program = folder.path / self._recipe.program
        card = Card(
            version=state.version,
            day=state.day,
            created=utc_text(self._now()),
            parent=state.parent if trained.notes.loaded != NEW_WEIGHTS else None,
            step=trained.step,
            sha256=sha256,
            code=sha256_of(program),
            mosaic=version("mosaic-colocate"),
            torch=version("torch"),
            values=scores.mean_values(state.version),
        )
        versions.add(folder, card, day.model, program)
        save(decide(scores, _contest(folder, day), self._recipe.gate), day.gate)

    def _apply(self) -> None:
        """Applies the gate's result; a repeat after a kill changes nothing."""
        folder, promote, state = self._folder, self._recipe.promote, self._state
        result = load(GateResult, self._day.gate)
        if not result.passes:
            folder.note("refused", day=state.day, version=state.version, reason=result.reason)
            self._end("refused", result.reason)
        elif versions.is_overruled(folder, state.version):
            self._end("held", f"{result.reason} It was promoted, and a person has changed the champion since.")
        elif folder.hold.exists() and versions.linked(folder, "champion") != state.version:
            self._end("held", f"{result.reason} It was not promoted: promotions are on hold.")
        else:
            hooks.remember(folder, promote, state.version, state.day)
            versions.promote(folder, state.version, day=state.day, by="gate")
            self._end("promoted", result.reason)
            write_report(folder, self._day)  # hooks may read it
            failures = hooks.run_pending(folder, promote, state.version)
            self._set(messages=tuple(dict.fromkeys((*self._state.messages, *failures))))  # each once, even after a kill
        versions.drop_old(folder, promote.keep_versions)


def _contest(folder: Folder, day: DayFolder) -> Contest:
    """Returns the versions that a day's gate compares."""
    state = day.state
    return Contest(
        challenger=state.version,
        champion=state.champion,
        anchor=state.anchor,
        facts=load(ModelFacts, day.facts),
        folder=shlex.quote(str(folder.path.resolve())),
    )


class SimulatedDay(NamedTuple):
    day: str
    candidate: str
    """Its version; empty for a day that no gate judged."""
    then: str
    now: str
    """``promote`` or ``refuse``; empty for a day that no gate judged."""
    why: str


def simulate(root: Path, last: int) -> tuple[SimulatedDay, ...]:
    """Judges the last days again by today's recipe, from the scores that they kept; promotes and writes nothing.

    Each challenger meets the champion and the anchor that it met then: they are the versions that were scored on its
    rows.
    """
    if last < 1:
        raise ValueError(f"--last {last} names no day; use 1 or more")
    folder = Folder(root)
    gate, simulated = read_recipe(folder.recipe).gate, []
    for day in folder.days()[-last:] or (folder.find_day(None),):
        state = day.state
        if state.outcome not in ("promoted", "held", "refused"):
            then = state.outcome or "not finished"
            simulated.append(SimulatedDay(state.day, "", then, "", state.reason or "It was not judged."))
            continue
        for path in (day.scores, day.facts):
            if not path.is_file():
                raise MosaicError(
                    f"{path} is gone, so {state.day} cannot be judged again; restore it, or take fewer days by --last"
                )
        result = decide(load(DayScores, day.scores), _contest(folder, day), gate)
        now = "promote" if result.passes else "refuse"
        simulated.append(SimulatedDay(state.day, state.version, state.outcome, now, result.reason))
    return tuple(simulated)
