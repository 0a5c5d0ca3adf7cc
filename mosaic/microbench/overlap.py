"""``overlap``: how long does the same step of two modules take on each way of sharing a device?

Which part of a gain comes from quotas, and which from mere concurrency, is told apart by plain streams: these run
both modules at the same time and confine neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from mosaic.backends.base import Backend
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.microbench.budget import Budget
from mosaic.microbench.modules import default_subjects
from mosaic.microbench.overlap_result import Launching, OverlapResult, Passes, VariantTime, gain_of
from mosaic.microbench.result import Absent, Recorder, Spread
from mosaic.microbench.settings import BenchSettings
from mosaic.microbench.sharing.mps import NEEDS_S, rounds_under_mps
from mosaic.microbench.sharing.steps import CapturedSteps, EagerSteps, TwoModules
from mosaic.microbench.sharing.variants import Split, Variant, open_variant
from mosaic.profiler import Subject

Row = VariantTime | Absent
"""One way of sharing and one kind of step: its times, or why there are none."""

STEPS: tuple[tuple[Passes, Launching], ...] = tuple(
    (passes, launching) for launching in ("eager", "captured") for passes in ("forward+backward", "forward")
)
"""Kinds of steps in order of worth."""


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
    overlap = Overlap(backend, settings, budget, subjects=subjects)
    for _ in overlap.rows():
        pass
    return overlap.result()


class Overlap:
    """One run of the question, which hands out each row when it has it; arguments as of ``measure_overlap``.

    Whatever a variant raises is the reason of its own row, and the others go on. Only after an error that the whole
    process keeps, such as an illegal address, do the later ones fail too, and each of them says so.
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
        """Measures everything; the rows of one kind of step come out when its last round has ended."""
        for passes, launching in STEPS:
            modules = TwoModules(self._two[0], self._two[1], passes == "forward+backward")
            if self._recorder.budget.allows(f"{passes}, {launching}"):
                yield from self._kept(self._in_turn(modules, passes, launching))
        yield from self._kept(self._under_mps())
        yield from self._kept(absent for absent in self._recorder.absent if absent not in self._found)

    def result(self) -> OverlapResult:
        """Returns everything that was measured so far."""
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

    def _cannot(self, what: str, error: object) -> Iterator[Absent]:
        if absent := self._recorder.cannot(what, error):
            yield absent

    def _in_turn(self, modules: TwoModules, passes: Passes, launching: Launching) -> Iterator[Row]:
        """Opens every variant, then takes rounds over all of them; one that fails drops out alone."""
        with ExitStack() as stack:
            running = []
            for kind, split in self._wanted():
                try:
                    variant = open_variant(kind, self._backend, split)
                except Exception as error:
                    yield from self._cannot(_words(kind, split), error)
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

    def _wanted(self) -> list[tuple[str, Split]]:
        """Returns what to open: first what a gain is made of, then other ways to share."""
        count = self._backend.device.num_slots
        half: Split = (max(1, count // 2), max(1, count - count // 2))
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
        """Ends something; what it raises after an error of the device must not cost the other rows."""
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


def _words(kind: str, split: Split) -> str:
    return f"partitions {split[0]}+{split[1]}" if kind == "partitions" else kind.replace("_", " ")


@dataclass
class _Running:
    """A variant that takes its turns."""

    variant: Variant
    steps: EagerSteps | CapturedSteps
    samples: list[float] = field(default_factory=list)
    goes_on: bool = True

    def row(self, passes: Passes, launching: Launching) -> VariantTime:
        """Returns the rounds that it had."""
        return VariantTime(
            variant=self.variant.name,
            kind=self.variant.kind,
            quotas=self.variant.quotas,
            passes=passes,
            launching=launching,
            step_ms=Spread.of(self.samples),
            note=self.variant.note,
        )
