"""The seven days of ``mosaic retrain demo``, played with a timer, a user and failures.

Each day is an act: it runs the day and yields checks, which compare the result with the story.
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
from time import monotonic, sleep
from typing import NamedTuple

import torch
from rich.table import Table
from safetensors.numpy import load_file

from mosaic.artifact import load, steps_in
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.checkpoint.tensors import extract_weights
from mosaic.demo.days.digits import PLAIN, USUAL_VOICES, DayKind, write_day, write_starter
from mosaic.errors import MosaicError
from mosaic.retrain import steering, versions
from mosaic.retrain.folder import DayFolder, Folder, Outcome
from mosaic.retrain.records import WINDOW_OVER, Environment, Trained
from mosaic.retrain.report import DayReport
from mosaic.retrain.workers import DONE, QUARANTINED

FIRST_DAY = date(2026, 11, 22)
COMPARED_STEPS = 10  # between numbers of ranks: equal losses need the same samples in the same order
TRAINING_S, JUDGING_S = 15.0, 60.0
"""The short window: least seconds for start and training, and for judging."""
CLOSES = time(5, 30)  # ``until`` of the recipe
ASIDE = "aside"
PATIENCE_S = 180.0  # after which a missing step of a run is an error
Echo = Callable[[str], None]


class Check(NamedTuple):
    """The state in a few words, and True if it is as expected."""

    result: str
    met: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A retraining folder on a day; ``on_cpu`` hides GPUs from its runs."""

    path: Path
    date: date
    steps: int
    echo: Echo
    quick_s: float = 0.0
    """Time of the quickest day so far: a busy machine needs more time to start."""
    on_cpu: bool = False

    @property
    def day(self) -> DayFolder:
        return Folder(self.path).day(self.date.isoformat())

    @property
    def report(self) -> DayReport:
        return load(DayReport, self.day.report)

    def ended(self, outcome: Outcome, code: int | None = None) -> Check:
        """Compares the day's outcome with the expected one; without an exit code, runs the day first."""
        code = Run(self).wait() if code is None else code
        state = self.day.state
        met = state.outcome == outcome and code == (QUARANTINED if outcome in ("refused", "quarantined") else DONE)
        return Check(str(state.outcome), met, "" if met else f"exit code {code}: {state.reason}")

    def copy(self, name: str) -> Node:
        to = self.path / ASIDE / name
        shutil.copytree(self.path, to, symlinks=True, ignore=shutil.ignore_patterns(ASIDE))
        return replace(self, path=to)

    def set(self, table: str, **values: str) -> None:
        """Changes settings in a table of the recipe, each written as TOML has it."""
        path = Folder(self.path).recipe
        text = path.read_text(encoding="utf-8")
        for key, value in values.items():  # no two tables have settings of one name
            text = re.sub(rf"(?m)^{key} *=.*\n", "", text).replace(f"[{table}]\n", f"[{table}]\n{key} = {value}\n")
        path.write_text(text, encoding="utf-8")


class Run:
    """``mosaic retrain run``, as a timer in the night after a day starts it."""

    def __init__(self, node: Node, clock: time = time(1)) -> None:
        self._day, self._echo, self._is_killed = node.day, node.echo, False
        now = f"{datetime.combine(node.date + timedelta(days=1), clock).isoformat()}Z"
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "mosaic", "retrain", "run", str(node.path), "--now", now],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if node.on_cpu else {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> int:
        code = self._child.wait()
        self._reader.join(PATIENCE_S)
        return code

    def wait_for_step(self, step: int) -> None:
        """Waits for a training step; raises MosaicError if the run ends before, or takes too long."""
        until = monotonic() + PATIENCE_S
        while max(steps_in(self._day.metrics), default=0) < step:
            if self._child.poll() is not None:
                raise MosaicError(f"the run ended with {self.wait()} before step {step}; see what it printed above")
            if monotonic() > until:
                self.kill(launcher=True, workers=True)
                raise MosaicError(f"the run took more than {PATIENCE_S:.0f} s to step {step}; see the lines above")
            sleep(0.005)

    def kill(self, *, launcher: bool, workers: bool) -> None:
        """Kills the launcher, whose workers end by themselves; the workers, as without memory; or all at once."""
        self._is_killed = launcher
        for pid in (*([self._child.pid] if launcher else []), *(self._workers() if workers else [])):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if launcher:
            self.wait()

    def _workers(self) -> list[int]:
        children = Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children")
        return [int(pid) for pid in children.read_text(encoding="ascii").split()] if children.is_file() else []

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as printed:
            for line in printed:
                if not self._is_killed:  # later messages repeat the kill
                    self._echo(line.rstrip())


def three_kills(node: Node) -> Iterator[Check]:
    """Kills the worker, then the launcher, then both; compares with an undisturbed copy; approves the model."""
    undisturbed, run = node.copy("undisturbed"), Run(node)
    for step, name, launcher, workers in (
        (node.steps // 4, "the process that trains", False, True),
        (node.steps // 2, "the process that was started", True, False),
        (node.steps * 3 // 4, "all at once", True, True),
    ):
        run.wait_for_step(step)
        node.echo(f"kill -9 of {name}")
        run.kill(launcher=launcher, workers=workers)
        run = Run(node) if launcher else run
    yield node.ended("promoted", run.wait())
    count = len(node.day.state.starts) - 1
    yield Check(f"{count} restarts", count == 3)

    node.echo("the same day by the same plan, never killed:")
    undisturbed.day.path.mkdir(parents=True)
    shutil.copyfile(node.day.plan, undisturbed.day.plan)
    Run(undisturbed).wait()
    digest, expected = (load(Trained, each.day.trained).digest for each in (node, undisturbed))
    is_same_file = node.day.model.read_bytes() == undisturbed.day.model.read_bytes()
    yield Check("equal bits", digest == expected and is_same_file, f"{digest[:12]} and {expected[:12]}")
    node.echo(f"$ mosaic retrain promote {node.path.name} 1")
    node.echo(steering.promote(node.path, "1"))


def new_people(node: Node) -> Iterator[Check]:
    yield node.ended("promoted")


def no_audio(node: Node) -> Iterator[Check]:
    """A missing modality changes the plan, and must not be forgotten."""
    yield node.ended("promoted")
    plan, gate = node.report.plan, node.report.gate
    assert plan is not None
    assert gate is not None
    yield Check("re-planned", "audio" in plan.why, plan.why)
    (audio,) = (each for each in gate.comparisons if each.name == "modality=audio")
    yield Check(f"audio {audio.old:.3f} → {audio.new:.3f}", audio.passed)


def new_task(node: Node) -> Iterator[Check]:
    """Adds a third tower to the model; its old weights must be equal at step 0."""
    old, program = load_file(versions.champion(node.path).weights), node.path / "train.py"
    modalities = 'MODALITIES = ("image", "audio", "imu")'
    node.echo(f"train.py: {modalities}")
    program.write_text(re.sub(r"(?m)^MODALITIES = .*$", modalities, program.read_text(encoding="utf-8")), "utf-8")
    node.set("budget", save='"1h"')  # keeps the checkpoint of step 0 until the morning
    yield node.ended("promoted")
    node.set("budget", save='"1s"')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        extract_weights(checkpoints_in(node.day.checkpoints)[-1].path, path)
        new = load_file(path)
    added = ", ".join({name.split(".")[1] for name in new.keys() - old.keys()})
    equal = old.keys() <= new.keys() and all((new[name] == values).all() for name, values in old.items())
    yield Check(f"{len(old)} old tensors equal at step 0", equal and added == "imu", f"new: {added}")


def wrong_labels(node: Node) -> Iterator[Check]:
    """The data check must stop the day; in a copy without that check, the gate must."""
    champion, lenient = versions.champion(node.path).name, node.copy("lenient")
    yield node.ended("quarantined")
    node.echo("the same day without the check of the data:")
    lenient.set("check", max_drop="1.0")
    yield lenient.ended("refused")
    yield Check(f"{champion} stays", all(versions.champion(each.path).name == champion for each in (node, lenient)))


def other_ranks(node: Node) -> Iterator[Check]:
    """Trains on two ranks; a copy takes the first steps on one rank.

    Each rank needs a GPU of its own, so both train on CPU cores where there is one GPU.
    """
    if torch.cuda.device_count() == 1:
        node.echo("one GPU: both ranks train on CPU cores today")
        node = replace(node, on_cpu=True)
    node.set("budget", micro_batches="2", colocate="false")  # a rank that runs a module for others draws its dropout
    alone = node.copy("one-rank")
    node.set("budget", ranks="2")
    yield node.ended("promoted")
    node.echo("the first steps of the same day on one rank:")
    run = Run(alone)
    run.wait_for_step(COMPARED_STEPS + 1)
    run.kill(launcher=True, workers=True)
    rows, expected = (steps_in(each.day.metrics) for each in (node, alone))
    equal = all(
        math.isclose(rows[step]["loss"], expected[step]["loss"], rel_tol=1e-3) for step in range(1, COMPARED_STEPS + 1)
    )
    on_two = load(Environment, node.day.environment).num_ranks == 2
    yield Check(f"{COMPARED_STEPS} losses as on one rank", equal and on_two)
    node.set("budget", ranks="1", micro_batches="1")


def short_window(node: Node) -> Iterator[Check]:
    """Sets more steps than fit the window."""
    window_s = math.ceil(max(TRAINING_S, node.quick_s) + JUDGING_S)
    node.set("budget", colocate="false")  # the plan of two ranks does not fit one, and a trial would take the window
    node.set("budget", steps="20_000", judging=f'"{JUDGING_S:.0f}s"')
    began = monotonic()
    code = Run(node, (datetime.combine(node.date, CLOSES) - timedelta(seconds=window_s)).time()).wait()
    took_s = monotonic() - began
    yield node.ended("refused" if node.day.state.outcome == "refused" else "promoted", code)
    trained = load(Trained, node.day.trained)
    yield Check(f"{trained.ended} after {trained.step} steps", trained.ended == WINDOW_OVER)
    yield Check(f"{took_s:.0f} s of {window_s} s", took_s < window_s)


class StoryDay(NamedTuple):
    """One day of the demo: its change since the day before, its expected outcome, its rows, and its act."""

    change: str
    expected: str
    data: DayKind
    act: Callable[[Node], Iterator[Check]]


_WITH_MOTION = DayKind(mix={"image": 0.25, "audio": 0.25, "image+audio": 0.2, "imu": 0.3})
_NEW_PEOPLE = replace(PLAIN, voices=(*USUAL_VOICES[:16], *range(1072, 1088)), slant=0.2)
_DRIFT = replace(_WITH_MOTION, voices=(*USUAL_VOICES[:16], *range(1088, 1104)), slant=0.3, noise=0.5)
STORY = (
    StoryDay("none; three kills", "promoted, bits of an undisturbed run", PLAIN, three_kills),
    StoryDay("new voices and strokes", "promoted", _NEW_PEOPLE, new_people),
    StoryDay("no audio", "re-planned, audio kept by replay", DayKind(mix={"image": 1.0}), no_audio),
    StoryDay("a new task, motion", "partial load, old weights equal at step 0", _WITH_MOTION, new_task),
    StoryDay("half of the labels wrong", "quarantined", replace(_WITH_MOTION, wrong_site="south"), wrong_labels),
    StoryDay("two ranks", "same samples, losses as on one rank", _WITH_MOTION, other_ranks),
    StoryDay("strong drift, short window", "ends in time, judged as it is", _DRIFT, short_window),
)


class Played(NamedTuple):
    number: int
    day: StoryDay
    checks: tuple[Check, ...]

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)


def play(
    folder: Path,
    echo: Echo,
    *,
    numbers: Sequence[int] = range(1, 8),
    num_rows: int = 800,
    num_frozen: int = 1800,
    steps: int = 120,
) -> list[Played]:
    """Plays days of the story, of which 1 is the first, in a new folder; ``num_rows`` and ``steps`` are of each day."""
    node = Node(path=folder, date=FIRST_DAY, steps=steps, echo=lambda line: echo(f"    {line}"))
    played: list[Played] = []
    for number in numbers:
        day, began = STORY[number - 1], monotonic()
        echo(f"day {number}, {node.date}: {day.change}")
        if not played:
            write_starter(folder, node.date, num_rows=num_rows, num_frozen=num_frozen)
            node.set("budget", steps=str(steps), save='"1s"')
        else:
            write_day(folder / "data" / node.date.isoformat(), replace(day.data, num_rows=num_rows), seed=number)
        checks: list[Check] = []
        try:
            for check in day.act(node):
                checks.append(check)  # including those before an error
        except Exception as error:  # of any kind: the day differs from the story
            checks.append(Check("it FAILED", False, f"{type(error).__name__}: {error}"))
        played.append(Played(number, day, tuple(checks)))
        for check in checks:
            detail = f" ({check.detail})" if check.detail else ""
            echo(f"  {'ok' if check.met else 'NOT AS EXPECTED'}: {check.result}{detail}")
        took_s = monotonic() - began
        node = replace(node, date=node.date + timedelta(days=1), quick_s=min(took_s, node.quick_s or took_s))
    return played


def played_table(played: Sequence[Played]) -> Table:
    table = Table("day", "change", "expected", "result", "", box=None, padding=(0, 1))
    for day in played:
        outcomes = "; ".join(check.result for check in day.checks)
        table.add_row(str(day.number), day.day.change, day.day.expected, outcomes, "ok" if day.met else "NO")
    return table
