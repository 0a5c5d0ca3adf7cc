"""``mosaic demo``, step by step: data, model, plan, proof of equality, training, pictures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import mosaic
from mosaic.artifact import provenance, save, to_json
from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.child import plain_loops
from mosaic.demo.data import DigitTriples, load
from mosaic.demo.loop import WARM_STEPS, DemoSettings, Loop, train_step
from mosaic.demo.model import TriModal
from mosaic.demo.record import RunRecord
from mosaic.device import Device
from mosaic.engine import Handle
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, plan_from_quotas
from mosaic.profile import note_of_others
from mosaic.profiler import ForeignLoad, ProfileSettings
from mosaic.report.figure import save_figure
from mosaic.report.plan_view import plan_table
from mosaic.report.progress import Progress
from mosaic.report.table import graph_table, profile_table
from mosaic.report.timeline import timeline_figure, write_trace
from mosaic.take_turns import take_turns
from mosaic.timeline import Timeline

TOLERANCES = {"host": 0.0, "cuda": 1e-4}
"""Largest difference of values that count as equal, relative for values above 1: on fewer SMs of a GPU a library may
choose another kernel, and some kernels add up in an order that varies."""
_FEWEST_ROUNDS = 2
_MAX_ROUNDS_S = 90.0  # after which no further round of timed training begins


def run_demo(settings: DemoSettings, output: Path, backend: Backend, progress: Progress, console: Console) -> RunRecord:
    """Runs the demo and writes its files to ``output``."""
    origin = provenance()
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
    equality, compared = compare(settings, data, handle, backend, progress.advance)
    measured = _train_in_turn(model, handle, data, settings, backend, progress)
    timeline = handle.timeline() if handle.active else compared
    record = RunRecord(
        **origin,
        mosaic_version=mosaic.__version__,
        torch_version=torch.__version__,
        driver=handle.profile.environment.driver,
        machine=handle.plan.device,
        seed=settings.seed,
        predicted_ms_plain=handle.plan.sequential_ms,
        predicted_ms_colocated=handle.plan.predicted_ms,
        predicted_speedup=handle.plan.predicted_speedup,
        colocated=handle.active,
        **equality,
        **measured,
    )
    save(record, output / "run.json")
    subtitle = "; ".join((f"{handle.plan.device.name}, {record.created[:10]}", *record.notes[:1]))
    save_figure(timeline_figure([timeline], plan=handle.plan, subtitle=subtitle), output / "timeline.png")
    write_trace([timeline], output / "trace.json")
    handle.remove()
    return record


def compare(
    settings: DemoSettings, data: DigitTriples, handle: Handle, backend: Backend, advance: Callable[[], None]
) -> tuple[dict[str, Any], Timeline]:
    """Trains twice from the same seed, plain and colocated; returns the record's fields on equality, and a timeline.

    If the handle's plan runs no modules side by side, a comparison proves nothing: then each module gets one slot. On
    the host every lane has one thread, because other thread counts add the same sums in another order.
    """
    plan, is_of_timed_plan = handle.plan, handle.active and handle.plan.is_colocated
    if backend.device.kind == "host":
        num_slots = plan.device.num_slots
        backend = HostBackend(num_slots if is_of_timed_plan else max(2, num_slots), num_threads=1)
    if not is_of_timed_plan:
        plan = one_slot_plan(handle.graph, backend.device)
    device = backend.torch_device

    def train(*, colocated: bool) -> tuple[list[Tensor], Timeline | None]:
        model, stream = settings.make_model(device), settings.draw(data, settings.equality_steps, device)
        # Keys of attention have biases whose gradients are rounding alone; a large eps keeps AdamW from following it.
        optimizer = torch.optim.AdamW(model.parameters(), settings.size.learning_rate, eps=1e-4)
        ours = mosaic.colocate(model, sample=stream[0], plan=plan, backend=backend) if colocated else None
        torch.manual_seed(settings.seed)
        losses, timeline = [], None
        for batch in stream:
            losses.append(train_step(model, batch, optimizer))
            advance()
        if ours is not None:
            timeline = ours.timeline("colocated, for the comparison of numbers")
            ours.remove()
        return [torch.tensor(losses, dtype=torch.float64), *(p.detach() for p in model.parameters())], timeline

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        (expected, _), (actual, timeline) = train(colocated=False), train(colocated=True)
    assert timeline is not None
    torch.set_num_threads(num_threads)
    differences = [
        ((ours - plain).abs() / plain.abs().clamp(min=1)).max().double().cpu()
        for ours, plain in zip(actual, expected, strict=True)
    ]
    difference = torch.stack(differences).max().item()  # NaN where one is
    return {
        "bitwise_equal": difference == 0,
        "max_abs_difference": difference,
        "equality_tolerance": TOLERANCES[backend.device.kind],
        "equality_steps": settings.equality_steps,
        "equality_overlap": timeline.overlap,
        "equality_of_timed_plan": is_of_timed_plan,
    }, timeline


def one_slot_plan(graph: ModuleGraph, device: Device) -> Plan:
    """Places every module on one slot, side by side as far as slots go and dependencies allow."""
    stages: list[dict[str, int]] = []
    level: dict[str, int] = {}
    for name in graph.topological_order():
        level[name] = max((level[source] + 1 for source in graph.predecessors(name)), default=0)
        while level[name] < len(stages) and len(stages[level[name]]) == device.num_slots:
            level[name] += 1
        if level[name] == len(stages):
            stages.append({})
        stages[level[name]][name] = 1
    return plan_from_quotas(stages, graph=graph, device=device)


def _train_in_turn(
    model: TriModal, handle: Handle, data: DigitTriples, settings: DemoSettings, backend: Backend, progress: Progress
) -> dict[str, Any]:
    """Trains plain and colocated, a round each in turn, on the same batches; returns the record's measured fields."""
    twin, steps = settings.make_model(backend.torch_device), settings.steps_per_round
    model.load_state_dict(twin.state_dict())
    progress.phase("training plain and colocated in turn", total=settings.rounds)
    with _plain_loops(twin, data, settings, backend) as plains:
        ours = Loop(model, data, settings)
        ours.train(WARM_STEPS)
        for call in plains.values():
            call("train", WARM_STEPS)
        handle.clear_timeline()
        load_of_others = ForeignLoad()
        runs = {waiting: partial(call, "train", steps) for waiting, call in plains.items()}
        samples = take_turns({**runs, "colocated": partial(ours.train, steps)}, _rounds(settings.rounds, progress))
        foreign_share, overlap = load_of_others.share, handle.timeline().overlap
        waiting = min(plains, key=lambda name: statistics.median(chain(*samples[name])))
        with handle.disabled():
            retrieval_plain, retrieval = plains[waiting]("retrieval"), ours.retrieval()
    pairs = zip(samples[waiting], samples["colocated"], strict=True)
    ratios = tuple(statistics.median(plain_times) / statistics.median(times) for plain_times, times in pairs)
    note = note_of_others(foreign_share, handle.plan.device, strict=settings.strict)
    notes = [f"while steps were timed, {note}"] if note else []
    if len(ratios) < settings.rounds:
        notes.append(f"{len(ratios)} of {settings.rounds} rounds were timed in {_MAX_ROUNDS_S:.0f} s")
    if not handle.active:
        notes.append("the predicted gain was too small: the loop ran as it was, and the two are the same loop")
    plain_ms, colocated_ms = tuple(chain(*samples[waiting])), tuple(chain(*samples["colocated"]))
    return {
        "chance": 1 / len(data.test.strings),
        "retrieval": retrieval,
        "retrieval_plain": retrieval_plain,
        "train_steps": WARM_STEPS + len(colocated_ms),
        "step_ms_plain": statistics.median(plain_ms),
        "plain_waiting": waiting,
        "step_ms_colocated": statistics.median(colocated_ms),
        "speedup": statistics.median(ratios),
        "round_speedups": ratios,
        "step_times_ms_plain": plain_ms,
        "step_times_ms_colocated": colocated_ms,
        "overlap": overlap,
        "foreign_cpu_share": foreign_share,
        "notes": tuple(notes),
    }


@contextmanager
def _plain_loops(
    twin: TriModal, data: DigitTriples, settings: DemoSettings, backend: Backend
) -> Iterator[dict[str, Callable[..., Any]]]:
    """Yields functions that call methods of plain loops: on the host of two processes, on a GPU of ``twin``'s here."""
    if backend.device.kind == "host":
        with plain_loops("mosaic.demo.loop:plain_loop", to_json(settings)) as loops:
            yield loops
    else:
        loop = Loop(twin, data, settings)
        yield {"": lambda method, *arguments: getattr(loop, method)(*arguments)}


def _rounds(most: int, progress: Progress) -> Iterator[int]:
    """Yields the numbers of rounds until time is over; a busy machine has the first ones all the same."""
    ends_s = time.monotonic() + _MAX_ROUNDS_S
    for number in range(most):
        if number < _FEWEST_ROUNDS or time.monotonic() < ends_s:
            yield number
            progress.advance()
