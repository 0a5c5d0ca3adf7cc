"""The seven days of ``mosaic retrain demo``, played with a timer, a user and failures.

Each day is an act: it runs the day and yields checks, which compare what came of it with the story. Acts work on a
``Node`` by the operations of a timer, a user and failures: start, edit, copy, kill.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from pathlib import Path
from resource import RLIMIT_FSIZE, prlimit
from time import monotonic, sleep
from typing import NamedTuple

import torch
from rich.table import Table
from safetensors.numpy import load_file

from mosaic.artifact import load
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.checkpoint.tensors import extract_weights
from mosaic.demo.days.digits import DayKind, write_day, write_starter
from mosaic.errors import MosaicError
from mosaic.lines import steps_in
from mosaic.retrain import steering, versions
from mosaic.retrain.folder import DayFolder, Folder, Outcome
from mosaic.retrain.records import WINDOW_OVER, Environment, Trained
from mosaic.retrain.report import DayReport
from mosaic.retrain.workers import DONE, QUARANTINED

FIRST_DAY = date(2026, 11, 22)
COMPARED_STEPS = 10
"""Steps to compare between numbers of ranks: equal losses need the same samples in the same order."""
TRAINING_S, JUDGING_S = 15.0, 60.0
"""The short window: least seconds for start and training, and for judging."""
CLOSES = time(5, 30)
"""``until`` of the recipe."""
MODALITIES, MORE = 'MODALITIES = ("image", "audio")', 'MODALITIES = ("image", "audio", "imu")'
ASIDE = "aside"
PATIENCE_S = 180.0
"""Seconds after which a missing event of a run is an error."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A retraining folder; ``say`` prints the lines of its runs, and ``on_cpu`` hides GPUs from them."""

    path: Path
    say: Say
    on_cpu: bool = False

    def day(self, name: date) -> DayFolder:
        return Folder(self.path).day(name.isoformat())

    def begin(self, name: date, clock: str = "01:00:00") -> Run:
        """Starts ``mosaic retrain run`` like a timer in the night after a day, at a UTC time."""
        now = f"{(name + timedelta(days=1)).isoformat()}T{clock}Z"
        command = [sys.executable, "-m", "mosaic", "retrain", "run", str(self.path), "--now", now]
        return Run(self.day(name), command, self.say, {"CUDA_VISIBLE_DEVICES": ""} if self.on_cpu else {})

    def run(self, name: date) -> int:
        return self.begin(name).wait()

    def copy(self, name: str) -> Node:
        to = self.path / ASIDE / name
        shutil.copytree(self.path, to, symlinks=True, ignore=shutil.ignore_patterns(ASIDE))
        return replace(self, path=to)

    def edit(self, file: str, old: str, new: str) -> None:
        """Replaces a text of a file; raises MosaicError unless it occurs once."""
        text = (self.path / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise MosaicError(f"{self.path / file} has {old!r} {text.count(old)} times; it must have it once")
        (self.path / file).write_text(text.replace(old, new), encoding="utf-8")

    def set(self, **values: str) -> None:
        """Changes settings of the recipe, each written ``table__key="value as TOML has it"``."""
        path = Folder(self.path).recipe
        text = path.read_text(encoding="utf-8")
        for name, value in values.items():
            table, _, key = name.partition("__")  # no two tables have settings of one name
            text, heading = re.sub(rf"^{key} *=.*\n", "", text, flags=re.MULTILINE), f"\n[{table}]\n"
            text = text if heading in text else f"{text.rstrip()}\n{heading}"
            text = text.replace(heading, f"{heading}{key} = {value}\n")
        path.write_text(text, encoding="utf-8")


class Run:
    """A running command of ``mosaic retrain``; its output so far is in ``lines``."""

    def __init__(self, day: DayFolder, command: list[str], say: Say, environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._day, self._say, self._is_killed = day, say, False
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        code = self._child.wait()
        self._reader.join(PATIENCE_S)
        return code

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is in the day's log; raises MosaicError if the run ends before, or takes too long."""
        self._wait_for(lambda: max(steps_in(self._day.metrics), default=0) >= step, f"step {step}")

    def wait_for_line(self, part: str) -> None:
        """Waits for an output line with some text, as ``wait_for_step``."""
        self._wait_for(lambda: any(part in line for line in self.lines), f"a line with {part!r}")

    def kill(self, *, launcher: bool, workers: bool) -> None:
        """Kills the launcher, whose workers end by themselves; the workers, as without memory; or all at once."""
        pids = self._workers() if workers else ()
        if launcher:
            self._is_killed, pids = True, (self._child.pid, *pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if launcher:
            self.wait()

    def limit_files(self, num_bytes: int | None) -> None:
        """Limits the size of its workers' files, like a full disk; None for no limit.

        A write then fails with EFBIG ("file too large") instead of ENOSPC; both mean no room.
        """
        for pid in self._workers():
            with suppress(ProcessLookupError):
                hard = prlimit(pid, RLIMIT_FSIZE)[1]
                prlimit(pid, RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    def _workers(self) -> tuple[int, ...]:
        try:
            children = Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children").read_text(encoding="ascii")
        except OSError:
            return ()
        return tuple(map(int, children.split()))

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as printed:
            for line in printed:
                self.lines.append(line.rstrip())
                if not self._is_killed:  # later messages about the kill are not news
                    self._say(self.lines[-1])

    def _wait_for(self, happened: Callable[[], bool], what: str) -> None:
        until = monotonic() + PATIENCE_S
        while not happened():
            if self._child.poll() is not None:
                code = self.wait()  # for its last lines
                raise MosaicError(f"the run ended with {code} before {what} came; see what it printed above")
            if monotonic() > until:
                self.kill(launcher=True, workers=True)
                raise MosaicError(f"the run took more than {PATIENCE_S:.0f} s before {what} came; see the lines above")
            sleep(0.005)


class Check(NamedTuple):
    """A condition of the demo: the actual state in a few words, and True if it is as expected."""

    result: str
    met: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Today:
    node: Node
    name: date
    steps: int
    quick_s: float = 0.0
    """Time of the quickest day so far: a busy machine needs more time to start."""

    @property
    def day(self) -> DayFolder:
        return self.node.day(self.name)

    @property
    def report(self) -> DayReport:
        return load(DayReport, self.day.report)

    def ended(self, code: int, outcome: Outcome) -> Check:
        """Compares its outcome with the expected one."""
        state = self.day.state
        met = state.outcome == outcome and code == (QUARANTINED if outcome in ("refused", "quarantined") else DONE)
        return Check(str(state.outcome), met, "" if met else f"exit code {code}: {state.reason}")


def three_kills(today: Today) -> Iterator[Check]:
    """Kills the worker, then the launcher, then both; compares with an undisturbed copy; approves the model."""
    node, day = today.node, today.day
    undisturbed = node.copy("undisturbed")
    run = node.begin(today.name)
    run.wait_for_step(today.steps // 4)
    node.say("kill -9 of the process that trains")
    run.kill(launcher=False, workers=True)
    run.wait_for_step(today.steps // 2)
    node.say("kill -9 of the process that was started")
    run.kill(launcher=True, workers=False)
    run = node.begin(today.name)
    run.wait_for_step(today.steps * 3 // 4)
    node.say("kill -9 of all at once")
    run.kill(launcher=True, workers=True)
    yield today.ended(node.run(today.name), "promoted")
    count = len(today.day.state.starts) - 1
    yield Check(f"{count} restarts", count == 3)

    node.say("the same day by the same plan, never killed:")
    whole = undisturbed.day(today.name)
    whole.path.mkdir(parents=True)
    whole.plan.write_bytes(day.plan.read_bytes())
    undisturbed.run(today.name)
    digest, expected = (load(Trained, each.trained).digest for each in (day, whole))
    equal = digest == expected and day.model.read_bytes() == whole.model.read_bytes()
    yield Check("equal bits" if equal else "OTHER bits", equal, f"{digest[:12]} and {expected[:12]}")
    node.say(f"$ mosaic retrain promote {node.path.name} 1")
    node.say(steering.promote(node.path, "1"))


def new_people(today: Today) -> Iterator[Check]:
    yield today.ended(today.node.run(today.name), "promoted")


def no_audio(today: Today) -> Iterator[Check]:
    """Runs the day; a missing modality changes the plan, and must not be forgotten."""
    yield today.ended(today.node.run(today.name), "promoted")
    why = today.report.plan.why if today.report.plan is not None else ""
    yield Check("re-planned" if why else "NOT re-planned", "audio" in why, why)
    gate = today.report.gate
    for comparison in gate.comparisons if gate is not None else ():
        if comparison.name == "modality=audio":
            yield Check(f"audio {comparison.old:.3f} → {comparison.new:.3f}", comparison.passed)


def new_task(today: Today) -> Iterator[Check]:
    """Adds a third tower to the model; its old weights must be equal at step 0."""
    node, old = today.node, load_file(versions.champion(today.node.path).weights)
    node.say(f"train.py: {MORE}")
    node.edit("train.py", MODALITIES, MORE)
    node.set(budget__save='"1h"')  # keeps the checkpoint of step 0 until the morning
    yield today.ended(node.run(today.name), "promoted")
    node.set(budget__save='"1s"')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        extract_weights(checkpoints_in(today.day.checkpoints)[-1].path, path)
        new = load_file(path)
    added = ", ".join({name.split(".")[1] for name in new.keys() - old.keys()})
    equal = old.keys() <= new.keys() and all((new[name] == values).all() for name, values in old.items())
    words = f"{len(old)} old tensors {'equal' if equal else 'NOT equal'} at step 0"
    yield Check(words, equal and added == "imu", f"new: {added}")


def wrong_labels(today: Today) -> Iterator[Check]:
    """Runs the day, which the data check must stop; in a copy without that check, the gate must."""
    node, champion = today.node, versions.champion(today.node.path).name
    lenient = node.copy("lenient")
    yield today.ended(node.run(today.name), "quarantined")
    node.say("the same day without the check of the data:")
    lenient.set(check__max_drop="1.0")
    yield replace(today, node=lenient).ended(lenient.run(today.name), "refused")
    stays = all(versions.champion(each.path).name == champion for each in (node, lenient))
    yield Check(f"{champion} {'stays' if stays else 'does NOT stay'}", stays)


def other_ranks(today: Today) -> Iterator[Check]:
    """Trains on two ranks, with a full disk for a time; a copy takes the first steps on one rank.

    Each rank needs a GPU of its own, so both train on CPU cores where there is one GPU.
    """
    node = today.node
    if torch.cuda.device_count() == 1:
        node.say("one GPU: both ranks train on CPU cores today")
        node = replace(node, on_cpu=True)
    node.set(budget__micro_batches="2")
    alone = node.copy("one-rank")
    node.set(budget__ranks="2")
    run = node.begin(today.name)
    run.wait_for_step(5)
    node.say("the disk is full from now on")
    run.limit_files(1 << 16)
    run.wait_for_line("the disk was full")
    node.say("there is room again")
    run.limit_files(None)
    yield today.ended(run.wait(), "promoted")
    is_reported = any("disk was full" in line for line in today.report.messages)
    yield Check("full disk in the report" if is_reported else "NO word of the full disk", is_reported)

    node.say("the first steps of the same day on one rank:")
    run = alone.begin(today.name)
    run.wait_for_step(COMPARED_STEPS + 1)
    run.kill(launcher=True, workers=True)
    rows, expected = (steps_in(each.day(today.name).metrics) for each in (node, alone))
    steps = sorted(rows.keys() & expected.keys())[:COMPARED_STEPS]
    pairs = [(rows[step]["loss"], expected[step]["loss"]) for step in steps]
    equal = len(pairs) == COMPARED_STEPS and all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs)
    words = f"{len(pairs)} losses {'as on' if equal else 'OTHER than on'} one rank"
    yield Check(words, equal and load(Environment, today.day.environment).num_ranks == 2)
    node.set(budget__ranks="1", budget__micro_batches="1")


def short_window(today: Today) -> Iterator[Check]:
    """Sets more steps than fit the window."""
    node, window_s = today.node, math.ceil(max(TRAINING_S, today.quick_s) + JUDGING_S)
    node.set(budget__colocate="false")  # the plan of two ranks does not fit one, and a trial would take the window
    node.set(budget__steps="20_000", budget__judging=f'"{JUDGING_S:.0f}s"')
    opens = datetime.combine(today.name, CLOSES) - timedelta(seconds=window_s)
    began = monotonic()
    code = node.begin(today.name, opens.time().isoformat()).wait()
    took_s = monotonic() - began
    yield today.ended(code, "refused" if today.day.state.outcome == "refused" else "promoted")
    trained = load(Trained, today.day.trained)
    yield Check(f"{trained.ended} after {trained.step} steps", trained.ended == WINDOW_OVER)
    yield Check(f"{took_s:.0f} s of {window_s} s", took_s < window_s)


class StoryDay(NamedTuple):
    """One day of the demo: its change since the day before, its expected outcome, its rows, and its act."""

    change: str
    expected: str
    data: DayKind
    act: Callable[[Today], Iterator[Check]]


_WITH_MOTION = DayKind(mix={"image": 0.25, "audio": 0.25, "image+audio": 0.2, "imu": 0.3})
_NEW_PEOPLE = DayKind(new_voices=0, slant=0.2, ink=0.8)
_DRIFT = replace(_WITH_MOTION, new_voices=1, slant=0.3, turn=0.2, contrast=0.8, noise=0.5)
STORY = (
    StoryDay("none; three kills", "promoted, bits of an undisturbed run", DayKind(), three_kills),
    StoryDay("new voices and strokes", "promoted", _NEW_PEOPLE, new_people),
    StoryDay("no audio", "re-planned, audio kept by replay", DayKind(mix={"image": 1.0}), no_audio),
    StoryDay("a new task, motion", "partial load, old weights equal at step 0", _WITH_MOTION, new_task),
    StoryDay("half of the labels wrong", "alarm, refused", replace(_WITH_MOTION, wrong_site="south"), wrong_labels),
    StoryDay("two ranks, full disk", "same samples, losses as on one rank", _WITH_MOTION, other_ranks),
    StoryDay("strong drift, short window", "ends in time, judged as it is", _DRIFT, short_window),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    number: int
    day: StoryDay
    checks: tuple[Check, ...]
    seconds: float

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)


def play(
    folder: Path,
    say: Say,
    *,
    numbers: Sequence[int] = range(1, 8),
    num_rows: int = 800,
    num_frozen: int = 1800,
    steps: int = 120,
) -> list[Played]:
    """Plays days of the story, of which 1 is the first, in a new folder; ``num_rows`` and ``steps`` are of each day.

    Raises:
        MosaicError: The demo cannot run.
    """
    node = Node(folder, lambda line: say(f"    {line}"))
    played: list[Played] = []
    for place, number in enumerate(numbers):
        day, name, began = STORY[number - 1], FIRST_DAY + timedelta(days=place), monotonic()
        say(f"day {number}, {name}: {day.change}")
        if place == 0:
            write_starter(folder, name, num_rows=num_rows, num_frozen=num_frozen)
            node.set(budget__steps=str(steps), budget__save='"1s"')
        else:
            data = replace(day.data, num_rows=num_rows)
            write_day(folder / "data" / name.isoformat(), data, seed=number)
        quick_s = min((each.seconds for each in played), default=0.0)
        checks: list[Check] = []
        try:
            for check in day.act(Today(node, name, steps, quick_s)):
                checks.append(check)  # those before an error count, too
        except MosaicError as error:
            checks.append(Check("it FAILED", False, str(error)))
        played.append(Played(number=number, day=day, checks=tuple(checks), seconds=monotonic() - began))
        for check in checks:
            detail = f" ({check.detail})" if check.detail else ""
            say(f"  {'ok' if check.met else 'NOT AS EXPECTED'}: {check.result}{detail}")
    return played


def played_table(played: Sequence[Played]) -> Table:
    table = Table("day", "change", "expected", "came of it", "", box=None, padding=(0, 1))
    for day in played:
        outcomes = "; ".join(check.result for check in day.checks)
        table.add_row(str(day.number), day.day.change, day.day.expected, outcomes, "ok" if day.met else "NO")
    return table
