"""``overlap``: the step of two modules for each way of sharing a device.

Plain streams separate the gain of quotas from that of concurrency: they run both modules concurrently without confining
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from mosaic.microbench.kernels import default_subjects
from mosaic.microbench.result import ABSENT, Question, Result, Row, Setup, absent, bars_figure
from mosaic.microbench.settings import Spread
from mosaic.microbench.variants import CapturedSteps, EagerSteps, Variant, open_variant
from mosaic.profiler import Subject

STEPS = tuple((passes, launching) for launching in ("eager", "captured") for passes in ("forward+backward", "forward"))
"""Kinds of steps by importance: passes, and launching by operator or as one CUDA graph."""


def measure_overlap(setup: Setup) -> Iterator[Row]:
    """Times a transformer and convolutions on all variants in rounds; yields the rows of a kind of step.

    An error of a variant becomes the reason in its row, and the others continue.
    """
    subjects = default_subjects(setup.settings.scale, setup.backend.torch_device)
    gains = []
    for passes, launching in STEPS:
        if setup.budget.allows(f"{passes}, {launching}"):
            measured = [*_in_turn(setup, subjects, passes, launching)]
            yield from (row for row in measured if row.of == ABSENT)
            rows = [row for row in measured if row.of != ABSENT]
            base_ms = _median_of(rows, "sequential")
            for row in rows:
                speedup = {"speedup": _ratio(base_ms, row.number("step_ms"))}
                yield Row(of="times", labels=row.labels, values={**row.values, **speedup}, note=row.note)
            gains += gain_of(rows)
    yield from gains


def _in_turn(setup: Setup, subjects: Sequence[Subject], passes: str, launching: str) -> Iterator[Row]:
    """Opens every variant, then runs rounds over all; a failing variant drops out."""
    count = setup.backend.device.num_slots
    half, splits = (max(1, count // 2), max(1, count - count // 2)), setup.settings.splits(count)
    if not splits:
        yield absent("partitions", "the device has one slot, but two partitions need two")
    partitions = [("partitions", split) for split in splits]
    kinds = [("sequential", half), ("plain", half), *partitions, ("prioritised", half)]
    running: dict[str, tuple[Variant, EagerSteps | CapturedSteps]] = {}
    samples: dict[str, list[float]] = {}
    failures: list[Row] = []
    with ExitStack() as stack:
        for kind, split in kinds:
            name = f"partitions {split[0]}+{split[1]}" if kind == "partitions" else kind
            # a library may raise anything on a partition
            try:
                variant = open_variant(kind, setup.backend, split)
                stack.callback(_close, variant.name, variant.lanes.close, failures)
                name = f"{variant.name}, {passes}, {launching}"
                if launching == "captured" and not variant.lanes.launches_inline:
                    name = "captured steps"
                steps_of = EagerSteps if launching == "eager" else CapturedSteps
                steps = steps_of(variant, subjects, backward=passes == "forward+backward")
                stack.callback(_close, f"the steps of {variant.name}", steps.close, failures)
                steps.run(1)
            except Exception as error:  # becomes the row of the variant
                yield absent(name, error)
            else:
                running[variant.name], samples[variant.name] = (variant, steps), []
        failed_variants: set[str] = set()
        for number in range(setup.settings.rounds):
            remaining_rounds = f"{passes}, {launching}: rounds from {number + 1} on"
            if number and not setup.budget.allows(remaining_rounds):
                break
            for name in [name for name in running if name not in failed_variants]:
                try:
                    samples[name] += running[name][1].run(setup.settings.steps_per_round)
                except Exception as error:  # as above
                    failed_variants.add(name)
                    yield absent(f"{name}, {remaining_rounds}", error)
        for name, (variant, _) in running.items():
            if samples[name]:
                quotas = {} if variant.quotas is None else {"quotas": f"{variant.quotas[0]}+{variant.quotas[1]}"}
                names = " and ".join(subject.name for subject in subjects)
                step = {"modules": names, "passes": passes, "launching": launching}
                labels = {"variant": name, "kind": variant.kind, **quotas, **step}
                yield Row(of="times", labels=labels, values={"step_ms": Spread.of(samples[name])}, note=variant.note)
    yield from failures


def _close(task: str, close: Callable[[], object], failures: list[Row]) -> None:
    try:
        close()
    except Exception as error:  # after a device error; keeps the other rows
        failures.append(absent(f"ending {task}", error))


def gain_of(times: Sequence[Row]) -> list[Row]:
    """Splits the gain of a kind of step into concurrency and quotas; no row without measurements.

    Ratios of step times: ``total`` is sequential over the best partitions, ``concurrency`` sequential over plain
    streams, ``quotas`` plain streams over the best partitions.
    """
    if not times:
        return []
    sequential_ms, plain_ms, best_ms = (_median_of(times, kind) for kind in ("sequential", "plain", "partitions"))
    best = [row for row in times if row.labels["kind"] == "partitions" and row.number("step_ms") == best_ms]
    labels = {name: times[0].labels[name] for name in ("passes", "launching")}
    return [
        Row(
            of="gains",
            labels=labels | ({"best_partitions": best[0].labels["variant"]} if best else {}),
            values={
                "total": _ratio(sequential_ms, best_ms),
                "concurrency": _ratio(sequential_ms, plain_ms),
                "quotas": _ratio(plain_ms, best_ms),
            },
        )
    ]


def _median_of(times: Sequence[Row], kind: str) -> float | None:
    """Returns the smallest median step of a kind of variant."""
    return min((row.number("step_ms") or 0.0 for row in times if row.labels["kind"] == kind), default=None)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _summary(result: Result) -> Sequence[str]:
    lines = [*dict.fromkeys(f"the modules: {row.labels['modules']}" for row in result.of("times"))]
    for row in result.of("gains"):
        total, concurrency, quotas = map(row.text, ("total", "concurrency", "quotas"))
        split = f" = concurrency {concurrency} x quotas {quotas}" if row.number("quotas") is not None else ""
        best = row.labels.get("best_partitions")
        lines.append(
            f"{row.labels['passes']}, {row.labels['launching']}: gain {total}{split}"
            + (f" (best: {best})" if best else "")
        )
    lines += dict.fromkeys(f"{row.labels['variant']}: {row.note}" for row in result.of("times") if row.note)
    return lines


def _picture(result: Result, title: str, subtitle: str) -> Any:
    bars = []
    for row in result.of("times"):
        step = f"{row.labels['passes']}, {row.labels['launching']}"
        text = f"{row.number('step_ms'):.2f} ms  ({row.text('speedup')}×)"
        bars.append((f"{row.labels['variant']}, {step}", step, row.values["step_ms"] or 0.0, text))
    return bars_figure(title, subtitle, "milliseconds per step; (×): speed-up over one after the other", bars)


OVERLAP = Question(
    name="overlap",
    asks="how much of the gain comes from quotas, and how much from concurrency?",
    measure=measure_overlap,
    title="A step of two modules side by side, measured",
    of="times",
    columns={"passes": ("passes", None), "launching": ("launched", None), "variant": ("variant", None),
             "step_ms": ("time, ms", 3), "speedup": ("speed-up over one\nafter the other", 2)},
    summary=_summary,
    picture=_picture,
)  # fmt: skip
