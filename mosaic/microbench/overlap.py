"""``overlap``: the time of a step of two modules on each way of sharing a device.

Plain streams separate the gain of quotas from that of concurrency: they run both modules at the same time and confine
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from mosaic.backends.base import Backend
from mosaic.errors import MosaicError
from mosaic.microbench.kernels import default_subjects
from mosaic.microbench.report import Picture, Report, bar_of, number_text
from mosaic.microbench.result import NotMeasured, Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings, Budget
from mosaic.microbench.variants import CapturedSteps, EagerSteps, QuotaPair, TwoModules, Variant, open_variant
from mosaic.profiler import Subject

Passes = Literal["forward", "forward+backward"]
Launching = Literal["eager", "captured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTime:
    """One way of sharing, one kind of step."""

    variant: str
    """Variant, with its quotas."""
    kind: str
    """``sequential``, ``plain``, ``prioritised``, ``partitions`` or ``torch_contexts``."""
    quotas: tuple[int, int] | None
    """Slots of each module; None without a limit."""
    passes: Passes
    """Passes of a step."""
    launching: Launching
    """Operator by operator, or as one CUDA graph."""
    step_ms: Spread
    """Time from the step's beginning to the end of both modules."""
    note: str = ""
    """Remark about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Sources of a speed-up; ratios of median times, None if one of the two is missing."""

    passes: Passes
    """Passes of a step."""
    launching: Launching
    """Kind of launch."""
    total: float | None
    """One after the other, over the best partitions."""
    concurrency: float | None
    """One after the other, over plain streams."""
    quotas: float | None
    """Plain streams, over the best partitions; below 1 the quotas cost more than they gain."""
    best_partitions: str
    """The best of the tried splits; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult(Result):
    """Step times by way of sharing."""

    modules: tuple[str, str]
    """Names of the two modules."""
    times: tuple[VariantTime, ...]
    """All measured times."""
    gains: tuple[Gain, ...]
    """One for each kind of step."""


Row = VariantTime | NotMeasured
"""One way of sharing and one kind of step: its times, or the reason of their absence."""

STEPS: tuple[tuple[Passes, Launching], ...] = tuple(
    (passes, launching) for launching in ("eager", "captured") for passes in ("forward+backward", "forward")
)
"""Kinds of steps, the most important first."""


def measure_overlap(
    backend: Backend, settings: BenchSettings, budget: Budget | None = None, *, subjects: Sequence[Subject] = ()
) -> OverlapResult:
    """Times the same two modules on every variant, in rounds over all variants.

    Args:
        backend: Where to measure.
        settings: Sizes and bounds.
        budget: Time; reached variants keep their rounds.
        subjects: At least two modules, of which the first two count; empty for a transformer and convolutions.

    Raises:
        MosaicError: One module alone was given.
    """
    overlap = Overlap(backend, settings, budget, subjects=subjects)
    for _ in overlap.rows():
        pass
    return overlap.result()


class Overlap:
    """One run of the question, which yields each row when it is ready; arguments as for ``measure_overlap``.

    An error of a variant is the reason in its row, and the others continue. After a sticky error, such as an illegal
    address, the later variants fail too, each with a reason.
    """

    def __init__(
        self, backend: Backend, settings: BenchSettings, budget: Budget | None, *, subjects: Sequence[Subject] = ()
    ) -> None:
        if len(subjects) == 1:
            raise MosaicError(f"overlap needs two modules; the model has one, {subjects[0].name!r}")
        self._backend, self._settings = backend, settings
        self._recorder = Recorder(backend, budget or Budget())
        self._two = tuple(subjects[:2]) or default_subjects(settings.scale, backend.torch_device)
        self._times: list[VariantTime] = []
        self._num_yielded = 0

    def rows(self) -> Iterator[Row]:
        """Measures everything; yields the rows of a kind of step after its last round."""
        for passes, launching in STEPS:
            modules = TwoModules(self._two[0], self._two[1], passes == "forward+backward")
            if self._recorder.budget.allows(f"{passes}, {launching}"):
                for time in self._in_turn(modules, passes, launching):
                    self._times.append(time)
                    yield time
            yield from self._new_absences()

    def result(self) -> OverlapResult:
        """Returns the measurements so far."""
        gains = (gain_of(self._times, passes, launching) for passes, launching in STEPS)
        return OverlapResult(
            modules=(self._two[0].name, self._two[1].name),
            times=tuple(self._times),
            gains=tuple(gain for gain in gains if gain is not None),
            **self._recorder.common(),
        )

    def _new_absences(self) -> Iterator[NotMeasured]:
        absent = self._recorder.absent[self._num_yielded :]
        self._num_yielded += len(absent)
        yield from absent

    def _in_turn(self, modules: TwoModules, passes: Passes, launching: Launching) -> Iterator[VariantTime]:
        """Opens every variant, then runs rounds over all; a failing variant drops out alone."""
        samples: dict[str, list[float]] = {}
        with ExitStack() as stack:
            running: dict[str, tuple[Variant, EagerSteps | CapturedSteps]] = {}
            for kind, split in self._kinds():
                name = f"partitions {split[0]}+{split[1]}" if kind == "partitions" else kind.replace("_", " ")
                # A library may raise anything on a partition; its error is the reason in the row.
                try:
                    variant = open_variant(kind, self._backend, split)
                    stack.callback(self._close, variant.name, variant.lanes.close)
                    name = f"{variant.name}, {passes}, {launching}"
                    if launching == "captured" and not variant.lanes.launches_inline:
                        name = "captured steps"
                    steps = self._steps(variant, modules, launching, stack)
                    steps.run(1)
                except Exception as error:
                    self._recorder.cannot(name, error)
                else:
                    running[variant.name], samples[variant.name] = (variant, steps), []
            failed: set[str] = set()
            for number in range(self._settings.rounds):
                rest = f"{passes}, {launching}: rounds from {number + 1} on"
                if number and not self._recorder.budget.allows(rest):
                    break
                for name in [name for name in running if name not in failed]:
                    try:
                        samples[name] += running[name][1].run(self._settings.steps_per_round)
                    except Exception as error:
                        failed.add(name)
                        self._recorder.cannot(f"{name}, {rest}", error)
            for name, (variant, _) in running.items():
                if samples[name]:
                    yield VariantTime(
                        variant=name,
                        kind=variant.kind,
                        quotas=variant.quotas,
                        passes=passes,
                        launching=launching,
                        step_ms=Spread.of(samples[name]),
                        note=variant.note,
                    )

    def _kinds(self) -> list[tuple[str, QuotaPair]]:
        """Returns the variants to open: first those of the gain, then other ways to share."""
        count = self._backend.device.num_slots
        half: QuotaPair = (max(1, count // 2), max(1, count - count // 2))
        splits = self._settings.splits(count)
        if not splits:
            self._recorder.cannot("partitions", "the device has one slot, and two partitions need two")
        partitions = [("partitions", split) for split in splits]
        return [("sequential", half), ("plain", half), *partitions, ("prioritised", half), ("torch_contexts", half)]

    def _steps(
        self, variant: Variant, modules: TwoModules, launching: Launching, stack: ExitStack
    ) -> EagerSteps | CapturedSteps:
        if launching == "eager":
            return EagerSteps(variant, modules)
        steps = CapturedSteps(variant, modules)
        stack.callback(self._close, f"the graph of {variant.name}", steps.close)
        return steps

    def _close(self, what: str, close: Callable[[], object]) -> None:
        try:
            close()
        except Exception as error:  # after a device error, which must not lose the other rows
            self._recorder.cannot(f"ending {what}", error)


def gain_of(times: Sequence[VariantTime], passes: Passes, launching: Launching) -> Gain | None:
    """Splits the gain of one kind of step into concurrency and quotas; None without measurements."""
    step_times = [time for time in times if time.passes == passes and time.launching == launching]
    if not step_times:
        return None
    by_kind = {time.kind: time.step_ms.median for time in step_times if time.kind in ("sequential", "plain")}
    partitions = [time for time in step_times if time.kind == "partitions"]
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


def report_overlap(result: OverlapResult) -> Report:
    """Returns a row and a bar per kind of step and way of sharing."""
    rows, bars = [], []
    for time in result.times:
        step, speedup = f"{time.passes}, {time.launching}", _speedup(time, result)
        rows.append((step, time.variant, time.step_ms, speedup))
        text = f"{time.step_ms.median:.2f} ms  ({number_text(speedup)}×)"
        bars.append(bar_of(f"{time.variant}, {step}", step, time.step_ms, text))
    notes = dict.fromkeys(f"{time.variant}: {time.note}" for time in result.times if time.note)
    both = f"{result.modules[0]} and {result.modules[1]}"
    return Report(
        title=f"{both} side by side, measured",
        headings=(("step", None), ("variant", None), ("time, ms", 3), ("against one\nafter the other", 2)),
        rows=rows,
        merged=True,
        summary=[*map(_gain_text, result.gains), *notes],
        picture=Picture(
            title=f"{both}: a step of both, measured",
            x_axis="milliseconds a step; (×) against one after the other",
            bars=bars,
        ),
    )


def _speedup(time: VariantTime, result: OverlapResult) -> float | None:
    base = [
        other.step_ms.median
        for other in result.times
        if other.kind == "sequential" and (other.passes, other.launching) == (time.passes, time.launching)
    ]
    return base[0] / time.step_ms.median if base and time.step_ms.median > 0 else None


def _gain_text(gain: Gain) -> str:
    return (
        f"{gain.passes}, {gain.launching}: gain {number_text(gain.total)} = concurrency "
        f"{number_text(gain.concurrency)} x quotas {number_text(gain.quotas)}"
        + (f" ({gain.best_partitions}, best of those tried)" if gain.best_partitions else "")
    )
