"""The main job, step by step: data, model, plan, proof of equality, training, pictures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import mosaic
from mosaic.artifact import parse, save
from mosaic.demo.data import Batch, DigitTriples, batches, load
from mosaic.demo.equality import Equality, compare
from mosaic.demo.loop import retrieval, train
from mosaic.demo.model import TriModal
from mosaic.demo.plain import PlainProcess, PlainSettings, timed_steps
from mosaic.demo.record import RunRecord
from mosaic.engine import Handle
from mosaic.engine.host.plain_timeline import recorded
from mosaic.profiler import ForeignLoad, ProfileSettings
from mosaic.provenance import Provenance
from mosaic.report.progress import Progress
from mosaic.report.table import graph_table, plan_table, profile_table
from mosaic.report.timeline import draw_timelines
from mosaic.report.trace import write_trace
from mosaic.timeline import Timeline

_WARM_STEPS = 3
_PICTURE_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """How much the demo does.

    Raises:
        ValueError: A count is below one.
    """

    output: Path
    """Folder for what it leaves."""
    cache: Path
    """Folder of the data set."""
    seed: int = 0
    """Of model, batches and dropout."""
    rounds: int = 12
    """Rounds of training, plain and colocated in turn."""
    steps_per_round: int = 20
    """Steps of each in a round."""
    max_foreign_share: float = 0.6
    """Share of the CPU that others may take before profiling is refused."""
    equality_steps: int = 8
    """Steps compared bit for bit."""
    batch_size: int = 48
    """Samples in a batch."""
    learning_rate: float = 2e-3
    """Of AdamW."""

    def __post_init__(self) -> None:
        for name in ("rounds", "steps_per_round", "equality_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")


@dataclass(frozen=True, slots=True)
class _Training:
    """What alternating training measured."""

    plain_ms: list[list[float]]
    colocated_ms: list[list[float]]
    plain_timeline: Timeline
    colocated_timeline: Timeline
    overlap: float
    retrieval: dict[str, float]
    retrieval_plain: dict[str, float]
    foreign_share: float | None

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(
            statistics.median(plain) / statistics.median(ours)
            for plain, ours in zip(self.plain_ms, self.colocated_ms, strict=True)
        )


def run_demo(settings: DemoSettings, progress: Progress, console: Console) -> RunRecord:
    """Runs the main job and leaves its files in ``settings.output``.

    Raises:
        MosaicError: An extra is missing, the folder cannot be written, or the machine is too busy to measure.
    """
    provenance = Provenance.here()
    save_probe(settings.output)
    speaking = progress.follow("speaking the words of the data set")
    data = load(settings.cache, seed=settings.seed, progress=lambda done, total: speaking("", done, total))
    torch.manual_seed(settings.seed)
    model = TriModal()
    handle = colocate_and_show(model, _first_batch(data, settings), settings, progress, console)
    progress.phase("comparing plain and colocated training bit for bit", total=2 * settings.equality_steps)
    equality = compare(
        list(batches(data.train, settings.batch_size, settings.seed, settings.equality_steps)),
        handle,
        seed=settings.seed,
        learning_rate=settings.learning_rate,
        advance=progress.advance,
    )
    console.print(_equality_line(equality))
    training = _train_in_turn(model, handle, data, settings, progress)
    record = _record(settings, provenance, handle, equality, training)
    save(record, settings.output / "run.json")
    draw_timelines(
        [training.plain_timeline, training.colocated_timeline],
        settings.output / "timeline.png",
        plan=handle.plan,
        subtitle=f"{handle.plan.device.name}, {record.created[:10]}",
        choice="typical",
    )
    write_trace([training.plain_timeline, training.colocated_timeline], settings.output / "trace.json")
    handle.remove()
    return record


def save_probe(folder: Path) -> None:
    """Makes the output folder and tries to write to it, before minutes are spent on what could not be kept."""
    from mosaic.artifact import write_text

    probe = folder / ".probe"
    write_text("", probe)
    probe.unlink()


def _first_batch(data: DigitTriples, settings: DemoSettings) -> Batch:
    return next(iter(batches(data.train, settings.batch_size, settings.seed, 1)))


def colocate_and_show(
    model: TriModal, batch: Batch, settings: DemoSettings, progress: Progress, console: Console
) -> Handle:
    """Adds the one line, prints what it found, and keeps profile and plan."""
    handle = mosaic.colocate(
        model,
        sample=batch,
        options=mosaic.Options(
            cache=None,  # measuring is part of what is shown, and nothing of it is left in the user's own folder
            trial=None,  # the solved plan is measured here in many more rounds, against the plain loop at its best
            profiling=ProfileSettings(sample_seconds=0.6, refuse_share=settings.max_foreign_share),
            if_busy="raise",  # what is measured here is what is shown
            progress=progress.follow("profiling the modules"),
        ),
    )
    assert handle.profile is not None
    save(handle.profile, settings.output / "profile.json")
    save(handle.plan, settings.output / "plan.json")
    console.print(graph_table(handle.graph))
    console.print(profile_table(handle.profile))
    console.print(plan_table(handle.plan))
    console.print(handle.describe(), highlight=False)
    return handle


def _equality_line(equality: Equality) -> str:
    if equality.bitwise_equal:
        plan = "the plan above" if equality.is_of_timed_plan else "a plan of one slot a module"
        return (
            f"plain and colocated training agree bit for bit after {equality.steps} steps by {plan}, with "
            f"{equality.overlap:.0%} of lane time overlapping"
        )
    return f"plain and colocated training DIFFER by up to {equality.max_abs_difference:.3g}"


def _train_in_turn(
    model: TriModal, handle: Handle, data: DigitTriples, settings: DemoSettings, progress: Progress
) -> _Training:
    """Trains plain (in its own process) and colocated (here), a round each in turn, on the same batches."""
    steps = _WARM_STEPS + settings.rounds * settings.steps_per_round + _PICTURE_STEPS
    stream = iter(list(batches(data.train, settings.batch_size, settings.seed, steps)))
    torch.manual_seed(settings.seed)
    model.load_state_dict(TriModal().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)

    def ours(count: int) -> list[float]:
        return list(timed_steps(lambda batch: train(model, [batch], optimizer), [next(stream) for _ in range(count)]))

    progress.phase("training plain and colocated in turn", total=settings.rounds)
    plain_settings = PlainSettings(
        cache=settings.cache,
        seed=settings.seed,
        batch_size=settings.batch_size,
        steps=steps,
        learning_rate=settings.learning_rate,
    )
    plain_ms, colocated_ms = [], []
    with PlainProcess(plain_settings) as plain:
        plain.train(_WARM_STEPS)
        ours(_WARM_STEPS)
        handle.clear_timeline()
        load_of_others = ForeignLoad(friends=(plain.pid,))
        for _ in range(settings.rounds):
            plain_ms.append(plain.train(settings.steps_per_round))
            colocated_ms.append(ours(settings.steps_per_round))
            progress.advance()
        foreign = load_of_others.share
        overlap = handle.timeline().overlap
        plain_timeline = parse(Timeline, json.dumps(plain.timeline(_PICTURE_STEPS)), source="the plain loop")
        our_timeline = _recorded(model, handle, lambda: ours(1))
        retrieval_plain = plain.retrieval()
    with handle.disabled():
        found = retrieval(model, data.test)
    return _Training(plain_ms, colocated_ms, plain_timeline, our_timeline, overlap, found, retrieval_plain, foreign)


def _recorded(model: TriModal, handle: Handle, step: Callable[[], object]) -> Timeline:
    """Takes the steps of the picture; a model that was left as it was is watched from outside."""
    handle.clear_timeline()
    if handle.active:
        for _ in range(_PICTURE_STEPS):
            step()
        return handle.timeline()
    towers = {name: model.get_submodule(name) for name in handle.graph.names}
    with recorded(towers, handle.plan.device.num_slots) as recorder:
        for _ in range(_PICTURE_STEPS):
            step()
            recorder.end_step()
    return recorder.timeline("colocate() left the loop as it was")


def _record(
    settings: DemoSettings, provenance: Provenance, handle: Handle, equality: Equality, training: _Training
) -> RunRecord:
    chance = training.retrieval.pop("chance")
    training.retrieval_plain.pop("chance")
    plain = [time for times in training.plain_ms for time in times]
    ours = [time for times in training.colocated_ms for time in times]
    notes: list[str] = []
    if training.foreign_share is not None and training.foreign_share > 0.10:
        notes.append(
            f"other processes took {training.foreign_share:.0%} of the CPU while steps were timed: run it again on a "
            "quiet machine before believing the speed-up"
        )
    if not handle.active:
        notes.append("the predicted gain was too small: the loop ran as it was, and the two are the same loop")
    return RunRecord(
        command=provenance.command,
        created=provenance.created,
        commit=provenance.commit,
        mosaic_version=mosaic.__version__,
        torch_version=torch.__version__,
        python_version=provenance.python_version,
        machine=handle.plan.device,
        seed=settings.seed,
        bitwise_equal=equality.bitwise_equal,
        max_abs_difference=equality.max_abs_difference,
        equality_steps=equality.steps,
        equality_overlap=equality.overlap,
        equality_of_timed_plan=equality.is_of_timed_plan,
        retrieval=training.retrieval,
        retrieval_plain=training.retrieval_plain,
        chance=chance,
        train_steps=_WARM_STEPS + len(ours) + _PICTURE_STEPS,
        step_ms_plain=statistics.median(plain),
        step_ms_colocated=statistics.median(ours),
        speedup=statistics.median(training.ratios),
        round_speedups=training.ratios,
        step_times_ms_plain=tuple(plain),
        step_times_ms_colocated=tuple(ours),
        predicted_ms_plain=handle.plan.sequential_ms,
        predicted_ms_colocated=handle.plan.predicted_ms,
        predicted_speedup=handle.plan.predicted_speedup,
        colocated=handle.active,
        overlap=training.overlap,
        foreign_cpu_share=training.foreign_share,
        notes=tuple(notes),
    )
