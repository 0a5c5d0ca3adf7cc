"""The main job, step by step: data, model, plan, proof of equality, training, pictures."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import mosaic
from mosaic.artifact import save, write_text
from mosaic.backends.base import Backend
from mosaic.child import WAITING, faster_of
from mosaic.demo.data import DigitTriples, load
from mosaic.demo.equality import Equality, compare
from mosaic.demo.model import SIZES, TriModal
from mosaic.demo.plain import Loop, LoopSettings, PlainProcess, recorded
from mosaic.demo.record import RunRecord, agreement
from mosaic.engine import Handle
from mosaic.profile import note_of_others
from mosaic.profiler import ForeignLoad, ProfileSettings
from mosaic.provenance import Provenance
from mosaic.report.plan_view import plan_table
from mosaic.report.progress import Progress
from mosaic.report.table import graph_table, profile_table
from mosaic.report.timeline import draw_timelines
from mosaic.report.trace import write_trace
from mosaic.timeline import Timeline

_WARM_STEPS = 3
_FEWEST_ROUNDS = 2
_MAX_ROUNDS_S = 90.0
"""Seconds after which no further round of timed training begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of the demo.

    Raises:
        ValueError: A count is below one.
    """

    output: Path
    """Folder for the results."""
    cache: Path
    """Folder of the data set."""
    seed: int = 0
    """Seed of model, batches and dropout."""
    rounds: int = 12
    """Rounds of training, plain and colocated in turn."""
    steps_per_round: int = 20
    """Steps of each in a round."""
    strict: bool = False
    """Fail if other processes used the CPU, instead of marking the results."""
    equality_steps: int = 8
    """Steps of the comparison of losses and parameters."""
    batch_size: int | None = None
    """Samples in a batch; by default of the device's size (``SIZES``)."""

    def __post_init__(self) -> None:
        for name in ("rounds", "steps_per_round", "equality_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")

    def for_loops(self, kind: str) -> LoopSettings:
        """Returns the settings of both loops on a kind of device."""
        return LoopSettings(
            cache=self.cache,
            seed=self.seed,
            kind=kind,
            batch_size=self.batch_size or SIZES[kind].batch_size,
            steps=_WARM_STEPS + self.rounds * self.steps_per_round,
        )


@dataclass(frozen=True, slots=True)
class _Training:
    """Measurements of both loops."""

    plain_ms: list[list[float]]
    plain_waiting: str
    colocated_ms: list[list[float]]
    timelines: tuple[Timeline, Timeline]
    retrieval_plain: dict[str, float]
    retrieval: dict[str, float]
    foreign_share: float | None


def run_demo(settings: DemoSettings, backend: Backend, progress: Progress, console: Console) -> RunRecord:
    """Runs the main job and writes its files to ``settings.output``.

    Raises:
        MosaicError: An extra is missing, or the folder cannot be written.
        UnstableMeasurementError: Other processes used the CPU, and ``settings.strict``.
    """
    provenance = Provenance.here()
    save_probe(settings.output)
    speaking = progress.follow("speaking the words of the data set")
    data = load(settings.cache, seed=settings.seed, progress=lambda done, total: speaking("", done, total))
    loops = settings.for_loops(backend.device.kind)
    model = loops.make_model(backend.torch_device)
    (batch,) = loops.draw(data, 1, backend.torch_device)
    handle = colocate_and_show(model, batch, settings, backend, progress, console)
    progress.phase("comparing plain and colocated training", total=2 * settings.equality_steps)
    equality = compare(loops, data, handle, backend, steps=settings.equality_steps, advance=progress.advance)
    console.print(_equality_line(equality))
    training = _train_in_turn(model, handle, data, settings, backend, progress)
    record = _record(settings, provenance, handle, equality, training)
    save(record, settings.output / "run.json")
    draw_timelines(
        training.timelines,
        settings.output / "timeline.png",
        plan=handle.plan,
        subtitle="; ".join((f"{handle.plan.device.name}, {record.created[:10]}", *record.notes)),
        choice="typical",
    )
    write_trace(training.timelines, settings.output / "trace.json")
    handle.remove()
    return record


def save_probe(folder: Path) -> None:
    """Creates the output folder and tests a write before the long run."""
    probe = folder / ".probe"
    write_text("", probe)
    probe.unlink()


def colocate_and_show(
    model: TriModal,
    batch: dict[str, torch.Tensor],
    settings: DemoSettings,
    backend: Backend,
    progress: Progress,
    console: Console,
) -> Handle:
    """Adds the one line, prints its results, and saves profile and plan."""
    handle = mosaic.colocate(
        model,
        sample=batch,
        backend=backend,
        options=mosaic.Options(
            cache=None,  # the demo shows the measurement, and leaves nothing in the user's cache
            trial=None,  # the demo times the solved plan in many more rounds, against the plain loop at its best
            profiling=ProfileSettings(sample_seconds=0.6, strict=settings.strict),
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
    plan = "the plan above" if equality.is_of_timed_plan else "a plan of one slot a module"
    return (
        f"plain and colocated training are {agreement(equality.max_abs_difference, equality.tolerance)} after "
        f"{equality.steps} steps by {plan}, with {equality.overlap:.0%} of lane time overlapping"
    )


def _train_in_turn(
    model: TriModal,
    handle: Handle,
    data: DigitTriples,
    settings: DemoSettings,
    backend: Backend,
    progress: Progress,
) -> _Training:
    """Trains plain and colocated, a round each in turn, on the same batches.

    On the host the plain loop runs in two processes, which differ in how threads wait, and the faster one counts. On a
    GPU one process runs both.
    """
    loops, num_slots = settings.for_loops(backend.device.kind), backend.device.num_slots
    twin = loops.make_model(backend.torch_device)
    model.load_state_dict(twin.state_dict())
    colocated_ms = []
    progress.phase("training plain and colocated in turn", total=settings.rounds)
    with ExitStack() as stack:
        plains: list[Loop | PlainProcess]
        if backend.api is None:
            plains = [stack.enter_context(PlainProcess(loops, passive=passive)) for passive in (False, True)]
        else:
            towers = dict(twin.named_children())
            plains = [Loop(twin, data, loops, stack.enter_context(recorded(towers, num_slots, api=backend.api)))]
        recorder = None
        if not handle.active:
            title, towers = "colocate() left the loop as it was", dict(model.named_children())
            recorder = stack.enter_context(recorded(towers, num_slots, title=title, api=backend.api))
        ours = Loop(model, data, loops, recorder)
        training: list[Loop | PlainProcess] = [*plains, ours]
        recording: list[Loop | PlainProcess | Handle] = [*plains, ours if recorder is not None else handle]
        for loop in training:
            loop.train(_WARM_STEPS)
        for each in recording:
            each.clear_timeline()
        load_of_others, ends_s = ForeignLoad(), time.monotonic() + _MAX_ROUNDS_S
        plain_ms: list[list[list[float]]] = [[] for _ in plains]
        for round_number in range(settings.rounds):
            if round_number >= _FEWEST_ROUNDS and time.monotonic() > ends_s:  # a busy machine gets a result too
                break
            for plain, times in zip(plains, plain_ms, strict=True):
                times.append(plain.train(settings.steps_per_round))
            colocated_ms.append(ours.train(settings.steps_per_round))
            progress.advance()
        foreign_share = load_of_others.share
        faster = faster_of([[time_ms for times in rounds for time_ms in times] for rounds in plain_ms])
        plain, waiting = plains[faster], WAITING[faster] if backend.api is None else ""
        timelines = plain.timeline(), ours.timeline() if recorder is not None else handle.timeline()
        retrieval_plain = plain.retrieval()
    with handle.disabled():
        return _Training(
            plain_ms[faster], waiting, colocated_ms, timelines, retrieval_plain, ours.retrieval(), foreign_share
        )


def _record(
    settings: DemoSettings, provenance: Provenance, handle: Handle, equality: Equality, training: _Training
) -> RunRecord:
    chance = training.retrieval.pop("chance")
    training.retrieval_plain.pop("chance")
    plain = [time for times in training.plain_ms for time in times]
    ours = [time for times in training.colocated_ms for time in times]
    ratios = tuple(
        statistics.median(plain) / statistics.median(ours)
        for plain, ours in zip(training.plain_ms, training.colocated_ms, strict=True)
    )
    note = note_of_others(training.foreign_share, handle.plan.device, strict=settings.strict)
    notes = [f"while steps were timed, {note}"] if note else []
    if len(training.plain_ms) < settings.rounds:
        notes.append(f"{len(training.plain_ms)} of {settings.rounds} rounds were timed in {_MAX_ROUNDS_S:.0f} s")
    if not handle.active:
        notes.append("the predicted gain was too small: the loop ran as it was, and the two are the same loop")
    return RunRecord(
        command=provenance.command,
        created=provenance.created,
        commit=provenance.commit,
        mosaic_version=mosaic.__version__,
        torch_version=torch.__version__,
        python_version=provenance.python_version,
        driver=handle.profile.environment.driver if handle.profile is not None else "",
        machine=handle.plan.device,
        seed=settings.seed,
        bitwise_equal=equality.max_abs_difference == 0,
        max_abs_difference=equality.max_abs_difference,
        equality_tolerance=equality.tolerance,
        equality_steps=equality.steps,
        equality_overlap=equality.overlap,
        equality_of_timed_plan=equality.is_of_timed_plan,
        retrieval=training.retrieval,
        retrieval_plain=training.retrieval_plain,
        chance=chance,
        train_steps=_WARM_STEPS + len(ours),
        step_ms_plain=statistics.median(plain),
        plain_waiting=training.plain_waiting,
        step_ms_colocated=statistics.median(ours),
        speedup=statistics.median(ratios),
        round_speedups=ratios,
        step_times_ms_plain=tuple(plain),
        step_times_ms_colocated=tuple(ours),
        predicted_ms_plain=handle.plan.sequential_ms,
        predicted_ms_colocated=handle.plan.predicted_ms,
        predicted_speedup=handle.plan.predicted_speedup,
        colocated=handle.active,
        overlap=training.timelines[1].overlap if handle.active else 0.0,
        foreign_cpu_share=training.foreign_share,
        notes=tuple(notes),
    )
