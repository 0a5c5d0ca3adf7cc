"""``overlap``: how long does the same step of two modules take on each way of sharing a device?

Which part of a gain comes from quotas, and which from mere concurrency, is told apart by plain streams: these run
both modules at the same time and confine neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Literal

from mosaic.backends.base import Backend
from mosaic.device import FORBID_EXTRA
from mosaic.errors import MosaicError
from mosaic.microbench.budget import Budget
from mosaic.microbench.modules import default_subjects
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings
from mosaic.microbench.steps import CapturedSteps, EagerSteps, TwoModules
from mosaic.microbench.variants import KINDS, UNAVAILABLE, Split, Variant, open_variant
from mosaic.profiler import Subject

Passes = Literal["forward", "forward+backward"]
Launching = Literal["eager", "captured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTime:
    """One way of sharing, one kind of step."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    variant: str
    """Which way, with its quotas."""
    kind: str
    """``sequential``, ``plain``, ``prioritised``, ``partitions``, ``torch_contexts`` or ``mps``."""
    quotas: tuple[int, int] | None
    """Slots of each module; None where nothing confines them."""
    passes: Passes
    """What a step is."""
    launching: Launching
    """Operator by operator, or as one CUDA graph."""
    step_ms: Spread
    """From the step's beginning to the end of both modules."""
    note: str = ""
    """What to know about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Where a speed-up comes from; ratios of median times, each None where one of the two is missing."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    passes: Passes
    """What a step is."""
    launching: Launching
    """How it is launched."""
    total: float | None
    """One after the other, over the best partitions."""
    concurrency: float | None
    """One after the other, over plain streams."""
    quotas: float | None
    """Plain streams, over the best partitions; below 1 the quotas cost more than they bring."""
    best_partitions: str
    """The split that was best of those tried; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult(Result):
    """Step times by way of sharing."""

    modules: tuple[str, str]
    """Names of the two modules."""
    times: tuple[VariantTime, ...]
    """Everything measured."""
    gains: tuple[Gain, ...]
    """One for each kind of step."""


def measure_overlap(
    backend: Backend, settings: BenchSettings, budget: Budget | None = None, *, subjects: Sequence[Subject] = ()
) -> OverlapResult:
    """Times the same two modules on every variant, in rounds in which the variants take turns.

    Args:
        backend: Where to measure.
        settings: Sizes and bounds.
        budget: Time; variants that were reached keep the rounds they had.
        subjects: The modules, at least two of which the first two are taken; none for a transformer and convolutions.

    Raises:
        MosaicError: One module alone was given.
    """
    recorder = Recorder(backend, budget or Budget())
    if len(subjects) == 1:
        raise MosaicError(f"overlap needs two modules; the model has one, {subjects[0].name!r}")
    two = subjects[:2] if subjects else default_subjects(settings.scale, backend.torch_device)
    times: list[VariantTime] = []
    kinds: tuple[tuple[Passes, Launching], ...] = tuple(
        (passes, launching) for launching in ("eager", "captured") for passes in ("forward+backward", "forward")
    )
    for passes, launching in kinds:
        modules = TwoModules(two[0], two[1], passes == "forward+backward")
        if recorder.budget.allows(f"{passes}, {launching}"):
            times += _measure_all(backend, modules, (passes, launching), settings, recorder)
    gains = tuple(gain_of(times, passes, launching) for passes, launching in kinds)
    return OverlapResult(
        modules=(two[0].name, two[1].name),
        times=tuple(times),
        gains=tuple(gain for gain in gains if gain is not None),
        absent=tuple(recorder.absent),
        left_out=recorder.left_out,
        origin=recorder.origin(),
    )


def _measure_all(
    backend: Backend,
    modules: TwoModules,
    step: tuple[Passes, Launching],
    settings: BenchSettings,
    recorder: Recorder,
) -> list[VariantTime]:
    """Opens every variant, then takes rounds over all of them."""
    taken: list[tuple[Variant, list[float]]] = []
    with ExitStack() as stack:
        running = []
        for variant in _variants(backend, settings, recorder, stack):
            try:
                steps = _steps(variant, modules, step[1], stack)
                steps.run(1)
            except UNAVAILABLE as error:
                recorder.cannot(f"{step[1]} steps", error)
                continue
            running.append((steps, taken_of(taken, variant)))
        for number in range(settings.rounds):
            if number and not recorder.budget.allows(f"{step[0]}, {step[1]}: rounds from {number + 1} on"):
                break
            for steps, samples in running:
                samples += steps.run(settings.steps_per_round)
    return [
        VariantTime(
            variant=variant.name,
            kind=variant.kind,
            quotas=variant.quotas,
            passes=step[0],
            launching=step[1],
            step_ms=Spread.of(samples),
            note=variant.note,
        )
        for variant, samples in taken
        if samples
    ]


def taken_of(taken: list[tuple[Variant, list[float]]], variant: Variant) -> list[float]:
    """Adds a variant with an empty list of samples, and returns the list."""
    samples: list[float] = []
    taken.append((variant, samples))
    return samples


def _variants(backend: Backend, settings: BenchSettings, recorder: Recorder, stack: ExitStack) -> list[Variant]:
    """Opens everything that can be had; what cannot is noted."""
    count = backend.device.num_slots
    half: Split = (max(1, count // 2), max(1, count - count // 2))
    splits = settings.splits(count)
    wanted = [(kind, half) for kind in KINDS if kind != "partitions"]
    wanted[3:3] = [("partitions", split) for split in splits]
    if not splits:
        recorder.cannot("partitions", "the device has one slot, and two partitions need two")
    found = []
    for kind, split in wanted:
        try:
            variant = open_variant(kind, backend, split)
        except UNAVAILABLE as error:
            recorder.cannot(kind.replace("_", " "), error)
        else:
            stack.callback(variant.lanes.close)
            found.append(variant)
    return found


def _steps(variant: Variant, modules: TwoModules, launching: Launching, stack: ExitStack) -> EagerSteps | CapturedSteps:
    if launching == "eager":
        return EagerSteps(variant, modules)
    steps = CapturedSteps(variant, modules)
    stack.callback(steps.close)
    return steps


def gain_of(times: Sequence[VariantTime], passes: Passes, launching: Launching) -> Gain | None:
    """Splits the gain of one kind of step into concurrency and quotas; None where nothing was measured."""
    chosen = [time for time in times if time.passes == passes and time.launching == launching]
    if not chosen:
        return None
    by_kind = {time.kind: time.step_ms.median for time in chosen if time.kind in ("sequential", "plain")}
    partitions = [time for time in chosen if time.kind == "partitions"]
    best = min(partitions, key=lambda time: time.step_ms.median, default=None)
    sequential, plain = by_kind.get("sequential"), by_kind.get("plain")
    best_ms = best.step_ms.median if best is not None else None
    return Gain(
        passes=passes,
        launching=launching,
        total=_ratio(sequential, best_ms),
        concurrency=_ratio(sequential, plain),
        quotas=_ratio(plain, best_ms),
        best_partitions=best.variant if best is not None else "",
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
