"""What happens on the seven days of the demo, and what has to come of it: an act plays a day and yields checks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path
from time import monotonic

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mosaic.artifact import load
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.checkpoint.plain_weights import extract_weights
from mosaic.demo.days.node import Node
from mosaic.errors import MosaicError
from mosaic.lines import steps_in
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder
from mosaic.retrain.records import DayReport, Outcome, RunFacts
from mosaic.train.exits import DONE, QUARANTINED
from mosaic.train.records import WINDOW_OVER, Trained

COMPARED_STEPS = 10
"""Steps whose losses are compared between numbers of ranks: equal bits need the same samples in the same order."""
TRAINING_S, JUDGING_S = 15.0, 60.0
"""The short window: for starting and training at least, and for judging, of which little is needed."""
CLOSES = time(5, 30)
"""``until`` of the recipe."""
MANY_STEPS = 20_000
"""No machine takes them in the short window."""
MODALITIES, MORE = 'MODALITIES = ("image", "audio")', 'MODALITIES = ("image", "audio", "imu")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that has to be so."""

    found: str
    """How it is, in a few words."""
    met: bool
    """Whether it is as it has to be."""
    detail: str = ""
    """More of it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A day that is played."""

    node: Node
    """The folder."""
    name: date
    """The day."""
    steps: int
    """Its steps."""
    quick_s: float = 0.0
    """What the quickest day so far took: a machine that is busy needs more time to start."""

    @property
    def day(self) -> DayFolder:
        """Its files."""
        return self.node.day(self.name)

    @property
    def report(self) -> DayReport:
        """What its report says."""
        return load(DayReport, self.day.report)

    @property
    def run(self) -> RunFacts:
        """How it ran, as its report says.

        Raises:
            MosaicError: Nothing was trained.
        """
        found = self.report.run
        if found is None:
            raise MosaicError(f"nothing was trained on {self.name}: {self.report.reason}")
        return found

    def ended(self, code: int, outcome: Outcome) -> Check:
        """Compares how it ended with how it should have."""
        state = self.day.state
        expected = QUARANTINED if outcome in ("refused", "quarantined") else DONE
        met = state.outcome == outcome and code == expected
        return Check(found=str(state.outcome), met=met, detail="" if met else f"exit code {code}: {state.reason}")


def three_kills(stage: Stage) -> Iterator[Check]:
    """Kills the worker, then the launcher, then both; compares with a copy that nobody disturbs; approves the model."""
    node, day = stage.node, stage.day
    undisturbed = node.copy("undisturbed")
    run = node.begin(stage.name)
    run.wait_for_step(stage.steps // 4)
    node.say("kill -9 of the process that trains")
    run.kill_workers()
    run.wait_for_step(stage.steps // 2)
    node.say("kill -9 of the process that was started")
    run.kill_launcher()
    run = node.begin(stage.name)
    run.wait_for_step(stage.steps * 3 // 4)
    node.say("kill -9 of all at once")
    run.kill_all()
    yield stage.ended(node.run(stage.name), "promoted")
    count = len(stage.run.restarts)
    yield Check(found=f"{count} restarts", met=count == 3)

    node.say("the same day by the same plan, never killed:")
    whole = undisturbed.day(stage.name)
    whole.path.mkdir(parents=True)
    whole.plan.write_bytes(day.plan.read_bytes())
    undisturbed.run(stage.name)
    mine, other = (load(Trained, each.trained).digest for each in (day, whole))
    equal = mine == other and day.model.read_bytes() == whole.model.read_bytes()
    yield Check(found="equal bits" if equal else "OTHER bits", met=equal, detail=f"{mine[:12]} and {other[:12]}")
    node.promote("1")


def new_people(stage: Stage) -> Iterator[Check]:
    """Runs the day."""
    yield stage.ended(stage.node.run(stage.name), "promoted")


def no_audio(stage: Stage) -> Iterator[Check]:
    """Runs the day; what its rows lack changes the plan, and must not be forgotten."""
    yield stage.ended(stage.node.run(stage.name), "promoted")
    why = stage.run.replanned
    yield Check(found="re-planned" if why else "NOT re-planned", met="audio" in why, detail=why)
    gate = stage.report.gate
    for one in gate.comparisons if gate is not None else ():
        if one.name == "modality=audio":
            yield Check(found=f"audio {one.old:.3f} → {one.new:.3f}", met=one.passed and one.counts)


def new_task(stage: Stage) -> Iterator[Check]:
    """Gives the model a third tower; what it knew has to be there at step 0."""
    node, champion = stage.node, versions.champion(stage.node.path).card
    node.say(f"train.py: {MORE}")
    node.edit("train.py", MODALITIES, MORE)
    node.set(budget__save='"1h"')  # so that the checkpoint of step 0 is still there in the morning
    yield stage.ended(node.run(stage.name), "promoted")
    node.set(budget__save='"1s"')
    old, new = _weights(node.day(date.fromisoformat(champion.day)), first=False), _weights(stage.day, first=True)
    added = ", ".join({name.split(".")[1] for name in new.keys() - old.keys()})
    equal = old.keys() <= new.keys() and all((new[name] == values).all() for name, values in old.items())
    words = "equal" if equal else "NOT equal"
    yield Check(found=f"{len(old)} old tensors {words} at step 0", met=equal and added == "imu", detail=f"new: {added}")


def wrong_labels(stage: Stage) -> Iterator[Check]:
    """Runs the day, which the check of the data has to stop; in a copy without that check, the gate has to."""
    node, champion = stage.node, versions.champion(stage.node.path).name
    lenient = node.copy("lenient")
    yield stage.ended(node.run(stage.name), "quarantined")
    node.say("the same day without the check of the data:")
    lenient.set(check__max_drop="1.0")
    yield Stage(lenient, stage.name, stage.steps).ended(lenient.run(stage.name), "refused")
    kept = all(versions.champion(each.path).name == champion for each in (node, lenient))
    yield Check(found=f"{champion} {'stays' if kept else 'does NOT stay'}", met=kept)


def other_ranks(stage: Stage) -> Iterator[Check]:
    """Trains on two ranks, while the disk is full for a time; a copy takes the first steps on one rank."""
    node = stage.node
    node.set(budget__micro_batches="2", budget__ranks_exact="true")
    alone = node.copy("one-rank")
    node.set(budget__ranks="2")
    run = node.begin(stage.name)
    run.wait_for_step(5)
    node.say("the disk is full from now on")
    run.limit_files(1 << 16)
    run.wait_for_line("the disk was full")
    node.say("there is room again")
    run.limit_files(None)
    yield stage.ended(run.wait(), "promoted")
    told = [line for line in stage.report.messages if "disk was full" in line]
    yield Check(found="full disk in the report" if told else "NO word of the full disk", met=bool(told))

    node.say("the first steps of the same day on one rank:")
    run = alone.begin(stage.name)
    run.wait_for_step(COMPARED_STEPS + 1)
    run.kill_all()
    two, one = (steps_in(each.day(stage.name).metrics) for each in (node, alone))
    pairs = [(two[step]["loss"], one[step]["loss"]) for step in sorted(two.keys() & one.keys())[:COMPARED_STEPS]]
    equal = len(pairs) == COMPARED_STEPS and all(mine == other for mine, other in pairs)
    words = "with the bits of" if equal else "OTHER than on"
    yield Check(found=f"{len(pairs)} losses {words} one rank", met=equal and stage.run.num_ranks == 2)
    node.set(budget__ranks="1", budget__micro_batches="1", budget__ranks_exact="false")


def short_window(stage: Stage) -> Iterator[Check]:
    """Asks for more steps than the window has room for."""
    node, window_s = stage.node, math.ceil(max(TRAINING_S, stage.quick_s) + JUDGING_S)
    node.set(budget__steps=str(MANY_STEPS), budget__judging=f'"{JUDGING_S:.0f}s"')
    opens = datetime.combine(stage.name, CLOSES) - timedelta(seconds=window_s)
    began = monotonic()
    code = node.begin(stage.name, opens.time().isoformat()).wait()
    took_s = monotonic() - began
    outcome: Outcome = "refused" if stage.day.state.outcome == "refused" else "promoted"
    yield stage.ended(code, outcome)
    trained = load(Trained, stage.day.trained)
    yield Check(found=f"{trained.ended} after {trained.step} steps", met=trained.ended == WINDOW_OVER)
    yield Check(found=f"{took_s:.0f} s of {window_s} s", met=took_s < window_s)


def _weights(day: DayFolder, *, first: bool) -> dict[str, NDArray[np.generic]]:
    """Reads the model's tensors from a day's first or last checkpoint of those that are kept."""
    kept = checkpoints_in(day.checkpoints)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        extract_weights(kept[-1 if first else 0].path, path)
        return dict(load_file(path))
