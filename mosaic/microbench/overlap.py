"""``overlap``: how long does the same step of two modules take on each way of sharing a device?

Which part of a gain comes from quotas, and which from mere concurrency, is told apart by plain streams: these run
both modules at the same time and confine neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from mosaic.backends.base import Backend
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.microbench.budget import Budget
from mosaic.microbench.modules import default_subjects
from mosaic.microbench.mps import NEEDS_S, rounds_under_mps
from mosaic.microbench.overlap_result import Launching, OverlapResult, Passes, VariantTime, gain_of
from mosaic.microbench.result import Recorder, Spread
from mosaic.microbench.settings import BenchSettings
from mosaic.microbench.steps import CapturedSteps, EagerSteps, TwoModules
from mosaic.microbench.variants import KINDS, UNAVAILABLE, Split, Variant, open_variant
from mosaic.profiler import Subject


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
    times += _under_mps(backend, settings, recorder, of_user=bool(subjects))
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
            taken.append((variant, []))
            running.append((steps, taken[-1][1]))
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


def _under_mps(backend: Backend, settings: BenchSettings, recorder: Recorder, *, of_user: bool) -> list[VariantTime]:
    """Measures the default modules in two processes, each with half of the device, operator by operator."""
    count = backend.device.num_slots
    first = max(1, count // 2)
    percentage = round(100 * first / count)
    try:
        if backend.torch_device.type != "cuda":
            raise BackendUnavailableError("MPS cannot be had", found=f"the {backend.name} backend", needed="a GPU")
        if of_user:
            raise BackendUnavailableError(
                "MPS is not measured", found="modules of a user's model", needed="the default modules"
            )
        if not recorder.budget.allows("MPS", needs_s=NEEDS_S):
            return []
        ordinal = backend.torch_device.index or 0
        samples = rounds_under_mps((percentage, 100 - percentage), ordinal, settings, backward=True)
    except UNAVAILABLE as error:
        recorder.cannot("mps", error)
        return []
    recorder.cannot("captured steps under MPS", "only operators that are launched one by one are measured there")
    return [
        VariantTime(
            variant=f"MPS {percentage} %+{100 - percentage} %",
            kind="mps",
            quotas=None,
            passes="forward+backward",
            launching="eager",
            step_ms=Spread.of(samples),
            note="two processes, by the host's clock; each number is the mean of a round, taken after the others",
        )
    ]


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
