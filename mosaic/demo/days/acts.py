"""What happens to the seven days of the demo, and what has to come of it; an act is a day, a check a sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from time import monotonic

from safetensors.numpy import load_file

from mosaic.artifact import load
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.checkpoint.plain_weights import extract_weights
from mosaic.demo.days.node import Node
from mosaic.lines import steps_in
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.records import DayReport, GateResult
from mosaic.train.exits import DONE, QUARANTINED
from mosaic.train.records import WINDOW_OVER, Trained

COMPARED_STEPS = 10
"""Steps whose losses are compared between numbers of ranks."""
LOSS_TOLERANCE = 1e-3
"""Relative difference of losses that rounding explains over these steps; other samples differ by a hundred times."""
JUDGING_S = 60.0
"""Kept free for judging in the short window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that has to be so."""

    sentence: str
    """Says how it is."""
    met: bool
    """Whether it is as it has to be."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A day that is played."""

    node: Node
    """The folder."""
    name: date
    """The day."""
    steps: int
    """Steps of the day."""

    @property
    def day(self) -> DayFolder:
        """Its files."""
        return self.node.day(self.name)

    @property
    def before(self) -> DayFolder:
        """The files of the day before."""
        return self.node.day(self.name - timedelta(days=1))

    @property
    def report(self) -> DayReport:
        """What its report says."""
        return load(DayReport, self.day.report)


def three_kills(stage: Stage) -> Iterator[Check]:
    """Kills the worker, then the launcher, then both at once; compares with a copy that nobody disturbs."""
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
    yield from _ended(stage, node.run(stage.name), DONE, "promoted")
    count = len(stage.report.run.restarts) if stage.report.run is not None else 0
    yield Check(sentence=f"{count} restarts", met=count == 3)

    node.say("the same day, never killed, by the same plan:")
    whole = undisturbed.day(stage.name)
    whole.path.mkdir(parents=True)
    whole.plan.write_bytes(day.plan.read_bytes())
    undisturbed.run(stage.name)
    mine, other = (load(Trained, each.trained).digest for each in (day, whole))
    equal = mine == other and day.model.read_bytes() == whole.model.read_bytes()
    yield Check(sentence=f"bits {'of' if equal else 'are NOT those of'} an undisturbed run", met=equal)
    node.order("promote", "1")


def new_people(stage: Stage) -> Iterator[Check]:
    """Runs the day."""
    yield from _ended(stage, stage.node.run(stage.name), DONE, "promoted")


def no_audio(stage: Stage) -> Iterator[Check]:
    """Runs the day; what is not in today's rows is planned for anew, and must not be forgotten."""
    yield from _ended(stage, stage.node.run(stage.name), DONE, "promoted")
    why = stage.report.run.replanned if stage.report.run is not None else ""
    yield Check(sentence=f"re-planned: {why or 'NO'}", met="audio" in why)
    gate = load(GateResult, stage.day.gate)
    for one in gate.comparisons:
        if one.name == "modality=audio":
            yield Check(sentence=f"audio slice {one.old:.3f} → {one.new:.3f}", met=one.passed)


def new_task(stage: Stage) -> Iterator[Check]:
    """Gives the model a third tower; what it knew has to be there at step 0."""
    node = stage.node
    node.say('train.py: MODALITIES = ("image", "audio", "imu")')
    node.edit("train.py", 'MODALITIES = ("image", "audio")', 'MODALITIES = ("image", "audio", "imu")')
    node.set(budget__save='"1h"')  # so that the checkpoint of step 0 is there in the morning
    yield from _ended(stage, node.run(stage.name), DONE, "promoted")
    champion = stage.day.state.champion
    assert champion is not None
    teacher = node.day(date.fromisoformat(versions.find(Folder(node.path), champion).card.day))
    old, new = _weights(teacher, first=False), _weights(stage.day, first=True)
    added = sorted({name.split(".")[1] for name in new.keys() - old.keys()})
    equal = old.keys() <= new.keys() and all((new[name] == values).all() for name, values in old.items())
    words = "equal" if equal else "NOT equal"
    yield Check(
        sentence=f"{len(old)} old tensors {words} at step 0, new: {', '.join(added)}", met=equal and bool(added)
    )
    node.set(budget__save='"1s"')


def wrong_labels(stage: Stage) -> Iterator[Check]:
    """Runs the day, which the check of the data has to stop; in a copy without that check, the gate has to."""
    node = stage.node
    lenient = node.copy("lenient")
    champion = versions.linked(Folder(node.path), "champion")
    yield from _ended(stage, node.run(stage.name), QUARANTINED, "quarantined")
    node.say("the same day where nobody looks at the data before:")
    lenient.set(check__max_drop="1.0")
    again = Stage(lenient, stage.name, stage.steps)
    yield from _ended(again, lenient.run(stage.name), QUARANTINED, "refused")
    kept = all(versions.linked(Folder(each.path), "champion") == champion for each in (node, lenient))
    yield Check(sentence=f"{champion} {'stays' if kept else 'does NOT stay'} the champion", met=kept)


def other_ranks(stage: Stage) -> Iterator[Check]:
    """Trains on two ranks, while the disk is full for a time; a copy takes the first steps on one rank."""
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
    yield from _ended(stage, run.wait(), DONE, "promoted")
    full = [line for line in stage.report.messages if "disk" in line]
    yield Check(sentence=full[0] if full else "NO word of the full disk", met=bool(full))

    node.say("the first steps of the same day on one rank:")
    run = alone.begin(stage.name)
    run.wait_for_step(COMPARED_STEPS + 1)
    run.kill_all()
    two, one = (steps_in(each.day(stage.name).metrics) for each in (node, alone))
    pairs = [(two[step]["loss"], one[step]["loss"]) for step in range(1, COMPARED_STEPS + 1)]
    most = max(abs(a / b - 1) for a, b in pairs)
    sentence = f"losses of {COMPARED_STEPS} steps on 2 ranks and on 1 differ by {most:.0e}"
    yield Check(sentence=sentence, met=most < LOSS_TOLERANCE)
    node.set(budget__ranks="1", budget__micro_batches="1")


def short_window(stage: Stage) -> Iterator[Check]:
    """Asks for more steps than the window has room for."""
    node = stage.node
    node.set(budget__steps="100000", budget__judging=f'"{JUDGING_S:.0f}s"')
    window_s = JUDGING_S + 20.0
    clock = f"05:{30 - 1 - window_s // 60:02.0f}:{60 - window_s % 60:02.0f}"
    began = monotonic()
    code = node.begin(stage.name, clock).wait()
    took_s = monotonic() - began
    outcome = stage.day.state.outcome
    judged = outcome in ("promoted", "refused") and code in (DONE, QUARANTINED)
    yield Check(sentence=f"{outcome}", met=judged)
    if stage.day.trained.is_file():
        trained = load(Trained, stage.day.trained)
        ended = f"{trained.ended} after {trained.step} of {trained.num_steps:,} steps"
        yield Check(sentence=ended, met=trained.ended == WINDOW_OVER)
    yield Check(sentence=f"{took_s:.0f} s of a window of {window_s:.0f} s", met=took_s < window_s)


def _ended(stage: Stage, code: int, expected: int, outcome: str) -> Iterator[Check]:
    found = stage.day.state.outcome
    met = found == outcome and code == expected
    yield Check(sentence=f"{found}" if code == expected else f"{found}, exit code {code}", met=met)


def _weights(day: DayFolder, *, first: bool) -> dict[str, object]:
    """Reads the model's tensors from a day's first or last checkpoint that is kept."""
    kept = checkpoints_in(day.checkpoints)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        extract_weights(kept[-1 if first else 0].path, path)
        return dict(load_file(path))
