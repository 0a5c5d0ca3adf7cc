"""The acts of the demo's seven days: each plays a day and yields checks."""

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
from mosaic.checkpoint.weights import extract_weights
from mosaic.demo.days.node import Node
from mosaic.errors import MosaicError
from mosaic.lines import steps_in
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder
from mosaic.retrain.records import DayReport, Outcome, RunFacts
from mosaic.train.exits import DONE, QUARANTINED
from mosaic.train.records import WINDOW_OVER, Trained

COMPARED_STEPS = 10
"""Steps to compare between numbers of ranks: equal losses need the same samples in the same order."""
TRAINING_S, JUDGING_S = 15.0, 60.0
"""The short window: least seconds for start and training, and for judging."""
CLOSES = time(5, 30)
"""``until`` of the recipe."""
MANY_STEPS = 20_000
"""More steps than any machine takes in the short window."""
MODALITIES, MORE = 'MODALITIES = ("image", "audio")', 'MODALITIES = ("image", "audio", "imu")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A condition of the demo."""

    result: str
    """The actual state, in a few words."""
    met: bool
    """True if it is as expected."""
    detail: str = ""
    """Details."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A day to play."""

    node: Node
    """The folder."""
    name: date
    """The day."""
    steps: int
    """Steps of the day."""
    quick_s: float = 0.0
    """Time of the quickest day so far: a busy machine needs more time to start."""

    @property
    def day(self) -> DayFolder:
        """Files of the day."""
        return self.node.day(self.name)

    @property
    def report(self) -> DayReport:
        """Report of the day."""
        return load(DayReport, self.day.report)

    @property
    def run(self) -> RunFacts:
        """Facts of its training, from its report.

        Raises:
            MosaicError: Nothing was trained.
        """
        facts = self.report.run
        if facts is None:
            raise MosaicError(f"nothing was trained on {self.name}: {self.report.reason}")
        return facts

    def ended(self, code: int, outcome: Outcome) -> Check:
        """Compares its outcome with the expected one."""
        state = self.day.state
        expected = QUARANTINED if outcome in ("refused", "quarantined") else DONE
        met = state.outcome == outcome and code == expected
        return Check(result=str(state.outcome), met=met, detail="" if met else f"exit code {code}: {state.reason}")


def three_kills(stage: Stage) -> Iterator[Check]:
    """Kills the worker, then the launcher, then both; compares with an undisturbed copy; approves the model."""
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
    yield Check(result=f"{count} restarts", met=count == 3)

    node.say("the same day by the same plan, never killed:")
    whole = undisturbed.day(stage.name)
    whole.path.mkdir(parents=True)
    whole.plan.write_bytes(day.plan.read_bytes())
    undisturbed.run(stage.name)
    digest, expected = (load(Trained, each.trained).digest for each in (day, whole))
    equal = digest == expected and day.model.read_bytes() == whole.model.read_bytes()
    yield Check(result="equal bits" if equal else "OTHER bits", met=equal, detail=f"{digest[:12]} and {expected[:12]}")
    node.promote("1")


def new_people(stage: Stage) -> Iterator[Check]:
    """Runs the day."""
    yield stage.ended(stage.node.run(stage.name), "promoted")


def no_audio(stage: Stage) -> Iterator[Check]:
    """Runs the day; a missing modality changes the plan, and must not be forgotten."""
    yield stage.ended(stage.node.run(stage.name), "promoted")
    why = stage.run.replanned
    yield Check(result="re-planned" if why else "NOT re-planned", met="audio" in why, detail=why)
    gate = stage.report.gate
    for comparison in gate.comparisons if gate is not None else ():
        if comparison.name == "modality=audio":
            yield Check(result=f"audio {comparison.old:.3f} → {comparison.new:.3f}", met=comparison.passed)


def new_task(stage: Stage) -> Iterator[Check]:
    """Adds a third tower to the model; its old weights must be equal at step 0."""
    node, champion = stage.node, versions.champion(stage.node.path).card
    node.say(f"train.py: {MORE}")
    node.edit("train.py", MODALITIES, MORE)
    node.set(budget__save='"1h"')  # keeps the checkpoint of step 0 until the morning
    yield stage.ended(node.run(stage.name), "promoted")
    node.set(budget__save='"1s"')
    old, new = _weights(node.day(date.fromisoformat(champion.day)), first=False), _weights(stage.day, first=True)
    added = ", ".join({name.split(".")[1] for name in new.keys() - old.keys()})
    equal = old.keys() <= new.keys() and all((new[name] == values).all() for name, values in old.items())
    words = "equal" if equal else "NOT equal"
    yield Check(
        result=f"{len(old)} old tensors {words} at step 0", met=equal and added == "imu", detail=f"new: {added}"
    )


def wrong_labels(stage: Stage) -> Iterator[Check]:
    """Runs the day, which the data check must stop; in a copy without that check, the gate must."""
    node, champion = stage.node, versions.champion(stage.node.path).name
    lenient = node.copy("lenient")
    yield stage.ended(node.run(stage.name), "quarantined")
    node.say("the same day without the check of the data:")
    lenient.set(check__max_drop="1.0")
    yield Stage(lenient, stage.name, stage.steps).ended(lenient.run(stage.name), "refused")
    stays = all(versions.champion(each.path).name == champion for each in (node, lenient))
    yield Check(result=f"{champion} {'stays' if stays else 'does NOT stay'}", met=stays)


def other_ranks(stage: Stage) -> Iterator[Check]:
    """Trains on two ranks, with a full disk for a time; a copy takes the first steps on one rank."""
    node = stage.node
    node.set(budget__micro_batches="2")
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
    disk_messages = [line for line in stage.report.messages if "disk was full" in line]
    yield Check(
        result="full disk in the report" if disk_messages else "NO word of the full disk", met=bool(disk_messages)
    )

    node.say("the first steps of the same day on one rank:")
    run = alone.begin(stage.name)
    run.wait_for_step(COMPARED_STEPS + 1)
    run.kill_all()
    two_ranks, one_rank = (steps_in(each.day(stage.name).metrics) for each in (node, alone))
    pairs = [
        (two_ranks[step]["loss"], one_rank[step]["loss"])
        for step in sorted(two_ranks.keys() & one_rank.keys())[:COMPARED_STEPS]
    ]
    equal = len(pairs) == COMPARED_STEPS and all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs)
    words = "as on" if equal else "OTHER than on"
    yield Check(result=f"{len(pairs)} losses {words} one rank", met=equal and stage.run.num_ranks == 2)
    node.set(budget__ranks="1", budget__micro_batches="1")


def short_window(stage: Stage) -> Iterator[Check]:
    """Sets more steps than fit the window."""
    node, window_s = stage.node, math.ceil(max(TRAINING_S, stage.quick_s) + JUDGING_S)
    node.set(budget__steps=str(MANY_STEPS), budget__judging=f'"{JUDGING_S:.0f}s"')
    node.set(budget__colocate="false")  # the plan of two ranks does not fit one, and a trial would take the window
    opens = datetime.combine(stage.name, CLOSES) - timedelta(seconds=window_s)
    began = monotonic()
    code = node.begin(stage.name, opens.time().isoformat()).wait()
    took_s = monotonic() - began
    outcome: Outcome = "refused" if stage.day.state.outcome == "refused" else "promoted"
    yield stage.ended(code, outcome)
    trained = load(Trained, stage.day.trained)
    yield Check(result=f"{trained.ended} after {trained.step} steps", met=trained.ended == WINDOW_OVER)
    yield Check(result=f"{took_s:.0f} s of {window_s} s", met=took_s < window_s)


def _weights(day: DayFolder, *, first: bool) -> dict[str, NDArray[np.generic]]:
    """Reads the model's tensors from a day's first or last kept checkpoint."""
    checkpoints = checkpoints_in(day.checkpoints)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        extract_weights(checkpoints[-1 if first else 0].path, path)
        return dict(load_file(path))
