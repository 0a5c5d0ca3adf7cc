"""``overlap``: the time of a step of two modules on each way of sharing a device.

Plain streams separate the gain of quotas from that of concurrency: they run both modules at the same time and confine
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mosaic.backends.base import Backend
from mosaic.device import FORBID_EXTRA
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.microbench.kernels import default_subjects
from mosaic.microbench.report import Picture, Report, bar_of, number_text
from mosaic.microbench.result import NotMeasured, Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings, Budget
from mosaic.microbench.sharing.mps import NEEDS_S, rounds_under_mps
from mosaic.microbench.sharing.steps import CapturedSteps, EagerSteps, TwoModules
from mosaic.microbench.sharing.variants import QuotaPair, Variant, open_variant
from mosaic.profiler import Subject

Passes = Literal["forward", "forward+backward"]
Launching = Literal["eager", "captured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTime:
    """One way of sharing, one kind of step."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    variant: str
    """Variant, with its quotas."""
    kind: str
    """``sequential``, ``plain``, ``prioritised``, ``partitions``, ``torch_contexts`` or ``mps``."""
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

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

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
        self._of_user = bool(subjects)
        self._two = tuple(subjects[:2]) if subjects else default_subjects(settings.scale, backend.torch_device)
        self._found: list[Row] = []

    def rows(self) -> Iterator[Row]:
        """Measures everything; yields the rows of a kind of step after its last round."""
        for passes, launching in STEPS:
            modules = TwoModules(self._two[0], self._two[1], passes == "forward+backward")
            if self._recorder.budget.allows(f"{passes}, {launching}"):
                yield from self._kept(self._in_turn(modules, passes, launching))
        yield from self._kept(self._under_mps())
        yield from self._kept(absent for absent in self._recorder.absent if absent not in self._found)

    def result(self) -> OverlapResult:
        """Returns the measurements so far."""
        times = [row for row in self._found if isinstance(row, VariantTime)]
        gains = tuple(gain_of(times, passes, launching) for passes, launching in STEPS)
        return OverlapResult(
            modules=(self._two[0].name, self._two[1].name),
            times=tuple(times),
            gains=tuple(gain for gain in gains if gain is not None),
            absent=tuple(self._recorder.absent),
            left_out=self._recorder.left_out,
            origin=self._recorder.origin(),
        )

    def _kept(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            self._found.append(row)
            yield row

    def _cannot(self, what: str, error: object) -> Iterator[NotMeasured]:
        if absent := self._recorder.cannot(what, error):
            yield absent

    def _in_turn(self, modules: TwoModules, passes: Passes, launching: Launching) -> Iterator[Row]:
        """Opens every variant, then runs rounds over all; a failing variant drops out alone."""
        with ExitStack() as stack:
            running = []
            for kind, split in self._kinds():
                try:
                    variant = open_variant(kind, self._backend, split)
                except Exception as error:
                    yield from self._cannot(_name_of(kind, split), error)
                    continue
                stack.callback(self._close, variant.name, variant.lanes.close)
                try:
                    steps = self._steps(variant, modules, launching, stack)
                    steps.run(1)
                except Exception as error:
                    on_threads = launching == "captured" and not variant.lanes.launches_inline
                    yield from self._cannot(
                        "captured steps" if on_threads else f"{variant.name}, {passes}, {launching}", error
                    )
                    continue
                running.append(_Running(variant, steps))
            for number in range(self._settings.rounds):
                if number and not self._recorder.budget.allows(f"{passes}, {launching}: rounds from {number + 1} on"):
                    break
                for each in [each for each in running if each.goes_on]:
                    try:
                        each.samples += each.steps.run(self._settings.steps_per_round)
                    except Exception as error:
                        each.goes_on = False
                        what = f"{each.variant.name}, {passes}, {launching}: rounds from {number + 1} on"
                        yield from self._cannot(what, error)
            for each in running:
                if each.samples:
                    yield each.row(passes, launching)

    def _kinds(self) -> list[tuple[str, QuotaPair]]:
        """Returns the variants to open: first those of the gain, then other ways to share."""
        count = self._backend.device.num_slots
        half: QuotaPair = (max(1, count // 2), max(1, count - count // 2))
        splits = self._settings.splits(count)
        if not splits:
            self._recorder.cannot("partitions", "the device has one slot, and two partitions need two")
        return [
            ("sequential", half),
            ("plain", half),
            *(("partitions", split) for split in splits),
            ("prioritised", half),
            ("torch_contexts", half),
        ]

    def _steps(
        self, variant: Variant, modules: TwoModules, launching: Launching, stack: ExitStack
    ) -> EagerSteps | CapturedSteps:
        if launching == "eager":
            return EagerSteps(variant, modules)
        steps = CapturedSteps(variant, modules)
        stack.callback(self._close, f"the graph of {variant.name}", steps.close)
        return steps

    def _close(self, what: str, close: Callable[[], object]) -> None:
        """Closes a resource; its error after a device error must not lose the other rows."""
        try:
            close()
        except Exception as error:
            self._recorder.cannot(f"ending {what}", error)

    def _under_mps(self) -> Iterator[Row]:
        """Measures the default modules in two processes, each with half of the device, operator by operator."""
        backend = self._backend
        count = backend.device.num_slots
        percentage = round(100 * max(1, count // 2) / count)
        try:
            if backend.torch_device.type != "cuda":
                raise BackendUnavailableError("MPS cannot be had", found=f"the {backend.name} backend", needed="a GPU")
            if self._of_user:
                raise BackendUnavailableError(
                    "MPS is not measured", found="modules of a user's model", needed="the default modules"
                )
            if not self._recorder.budget.allows("MPS", needs_s=NEEDS_S):
                return
            ordinal = backend.torch_device.index or 0
            samples = rounds_under_mps((percentage, 100 - percentage), ordinal, self._settings, backward=True)
        except Exception as error:
            yield from self._cannot("mps", error)
            return
        yield VariantTime(
            variant=f"MPS {percentage} %+{100 - percentage} %",
            kind="mps",
            quotas=None,
            passes="forward+backward",
            launching="eager",
            step_ms=Spread.of(samples),
            note="two processes, by the host's clock; each number is the mean of a round, taken after the others",
        )
        yield from self._cannot(
            "captured steps under MPS", "only operators that are launched one by one are measured there"
        )


def _name_of(kind: str, split: QuotaPair) -> str:
    return f"partitions {split[0]}+{split[1]}" if kind == "partitions" else kind.replace("_", " ")


@dataclass
class _Running:
    """An open variant."""

    variant: Variant
    steps: EagerSteps | CapturedSteps
    samples: list[float] = field(default_factory=list)
    goes_on: bool = True

    def row(self, passes: Passes, launching: Launching) -> VariantTime:
        """Returns its rounds."""
        return VariantTime(
            variant=self.variant.name,
            kind=self.variant.kind,
            quotas=self.variant.quotas,
            passes=passes,
            launching=launching,
            step_ms=Spread.of(self.samples),
            note=self.variant.note,
        )


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
