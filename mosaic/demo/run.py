"""``mosaic demo``, step by step: data, model, plan, proof of equality, training, pictures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import mosaic
from mosaic.artifact import check_writable, parse, save, to_json
from mosaic.backends.base import Backend
from mosaic.child import plain_loops
from mosaic.demo.data import DigitTriples, load
from mosaic.demo.equality import compare
from mosaic.demo.loop import WARM_STEPS, DemoSettings, Loop, Recorder
from mosaic.demo.model import TriModal
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
from mosaic.take_turns import take_turns
from mosaic.timeline import Timeline

_FEWEST_ROUNDS = 2
_MAX_ROUNDS_S = 90.0
"""Seconds after which no further round of timed training begins."""


def run_demo(settings: DemoSettings, output: Path, backend: Backend, progress: Progress, console: Console) -> RunRecord:
    """Runs the demo and writes its files to ``output``.

    Raises:
        MosaicError: An extra is missing, or the folder cannot be written.
        UnstableMeasurementError: Other processes used the CPU, and ``settings.strict``.
    """
    provenance = Provenance.here()
    check_writable(output / "run.json")
    data = load(settings.seed)
    model = settings.make_model(backend.torch_device)
    (batch,) = settings.draw(data, 1, backend.torch_device)
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
    save(handle.profile, output / "profile.json")
    save(handle.plan, output / "plan.json")
    for table in (graph_table(handle.graph), profile_table(handle.profile), plan_table(handle.plan)):
        console.print(table)
    console.print(handle.describe(), highlight=False)

    progress.phase("comparing plain and colocated training", total=2 * settings.equality_steps)
    equality = compare(settings, data, handle, backend, progress.advance)
    plan = "the plan above" if equality.is_of_timed_plan else "a plan of one slot a module"
    console.print(
        f"plain and colocated training are {agreement(equality.max_abs_difference, equality.tolerance)} after "
        f"{equality.steps} steps by {plan}, with {equality.overlap:.0%} of lane time overlapping"
    )

    measured, timelines = _train_in_turn(model, handle, data, settings, backend, progress)
    record = RunRecord(
        command=provenance.command,
        created=provenance.created,
        commit=provenance.commit,
        mosaic_version=mosaic.__version__,
        torch_version=torch.__version__,
        python_version=provenance.python_version,
        driver=handle.profile.environment.driver,
        machine=handle.plan.device,
        seed=settings.seed,
        bitwise_equal=equality.max_abs_difference == 0,
        max_abs_difference=equality.max_abs_difference,
        equality_tolerance=equality.tolerance,
        equality_steps=equality.steps,
        equality_overlap=equality.overlap,
        equality_of_timed_plan=equality.is_of_timed_plan,
        predicted_ms_plain=handle.plan.sequential_ms,
        predicted_ms_colocated=handle.plan.predicted_ms,
        predicted_speedup=handle.plan.predicted_speedup,
        colocated=handle.active,
        **measured,
    )
    save(record, output / "run.json")
    subtitle = "; ".join((f"{handle.plan.device.name}, {record.created[:10]}", *record.notes))
    draw_timelines(timelines, output / "timeline.png", plan=handle.plan, subtitle=subtitle)
    write_trace(timelines, output / "trace.json")
    handle.remove()
    return record


def _train_in_turn(
    model: TriModal,
    handle: Handle,
    data: DigitTriples,
    settings: DemoSettings,
    backend: Backend,
    progress: Progress,
) -> tuple[dict[str, Any], tuple[Timeline, Timeline]]:
    """Trains plain and colocated, a round each in turn, on the same batches; returns measured fields and timelines.

    On the host the plain loop runs in two processes, which differ in how threads wait, and the faster one counts. On a
    GPU one process runs both.
    """
    num_slots = backend.device.num_slots
    twin = settings.make_model(backend.torch_device)
    model.load_state_dict(twin.state_dict())
    progress.phase("training plain and colocated in turn", total=settings.rounds)
    with ExitStack() as stack:
        plains: dict[str, Callable[..., Any]]
        if backend.api is None:
            plains = stack.enter_context(plain_loops("mosaic.demo.loop:plain_loop", to_json(settings)))
        else:
            twin_loop = Loop(twin, data, settings, Recorder(twin, num_slots, api=backend.api))
            plains = {"": lambda method, *arguments: getattr(twin_loop, method)(*arguments)}
        recorder = None
        if not handle.active:
            recorder = Recorder(model, num_slots, title="left as it was", api=backend.api)
            stack.callback(recorder.remove)
        ours = Loop(model, data, settings, recorder)
        ours.warm_up()
        for call in plains.values():
            call("warm_up")
        if recorder is None:
            handle.clear_timeline()
        load_of_others, ends_s = ForeignLoad(), time.monotonic() + _MAX_ROUNDS_S
        num_rounds = 0

        def more() -> bool:
            nonlocal num_rounds
            num_rounds += 1
            if num_rounds > 1:
                progress.advance()
            return num_rounds <= _FEWEST_ROUNDS or time.monotonic() < ends_s  # a busy machine gets a result, too

        steps = settings.steps_per_round
        runs = {waiting: partial(call, "train", steps) for waiting, call in plains.items()}
        samples = take_turns({**runs, "colocated": partial(ours.train, steps)}, settings.rounds, more=more)
        foreign_share = load_of_others.share
        waiting = min(plains, key=lambda name: statistics.median(chain(*samples[name])))
        plain = plains[waiting]
        timelines = (
            parse(Timeline, plain("timeline_json"), source="the plain loop"),
            handle.timeline() if recorder is None else recorder.timeline(),
        )
        with handle.disabled():
            retrieval_plain, retrieval = plain("retrieval"), ours.retrieval()
    pairs = zip(samples[waiting], samples["colocated"], strict=True)
    ratios = [statistics.median(plain_times) / statistics.median(times) for plain_times, times in pairs]
    note = note_of_others(foreign_share, handle.plan.device, strict=settings.strict)
    notes = [f"while steps were timed, {note}"] if note else []
    if len(ratios) < settings.rounds:
        notes.append(f"{len(ratios)} of {settings.rounds} rounds were timed in {_MAX_ROUNDS_S:.0f} s")
    if not handle.active:
        notes.append("the predicted gain was too small: the loop ran as it was, and the two are the same loop")
    plain_ms, colocated_ms = tuple(chain(*samples[waiting])), tuple(chain(*samples["colocated"]))
    return {
        "chance": retrieval.pop("chance"),
        "retrieval": retrieval,
        "retrieval_plain": {name: share for name, share in retrieval_plain.items() if name != "chance"},
        "train_steps": WARM_STEPS + len(colocated_ms),
        "step_ms_plain": statistics.median(plain_ms),
        "plain_waiting": waiting,
        "step_ms_colocated": statistics.median(colocated_ms),
        "speedup": statistics.median(ratios),
        "round_speedups": tuple(ratios),
        "step_times_ms_plain": plain_ms,
        "step_times_ms_colocated": colocated_ms,
        "overlap": timelines[1].overlap if handle.active else 0.0,
        "foreign_cpu_share": foreign_share,
        "notes": tuple(notes),
    }, timelines
