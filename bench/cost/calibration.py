"""Setting a description's efficiencies from measured times, as PipeWeaver does for SEMU (sections 4.1 and 6.4).

The share of each peak that kernels reach, the host's time for a launch, the GPU's to begin a kernel and what one SM
draws of the memory are chosen so that predicted and measured times differ least: the logarithm of their ratio, squared
where it is small and as it is where it is large, every module with one weight however often it was measured.

A launch shows in times only where the host is slower than the GPU, and beginning a kernel only where it is not. Without
measurements of one kind, such as of small modules on all SMs or of large ones on few, that factor cannot be told: it
stays as described, and ``Calibrated.untold`` names it.

Seven factors fit a few modules and may then be wrong about all others. So how far they may move is chosen by leaving
one module after the other out, from nothing at all, through one speed for everything, to each kind of operator by
itself, held to the description's values less and less. A freer fit has to be better by more than the standard error of
its gain; where none is, nothing changes.

An *error* here is the factor by which a prediction is typically off, less one:
exp(mean |log(predicted / measured)|) - 1. Where errors are small it is the mean relative error;
unlike that, it does not favour predictions that are too short.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mosaic.cost.counts import ModuleCounts, OperatorKind, PhaseCounts
from mosaic.cost.roofline import ideal_time
from mosaic.hardware import Hardware
from mosaic.profile import Profile

MIN_MEASUREMENTS = 6
"""With fewer, so many factors fit anything and predict nothing."""

_FACTORS = ("matmul", "attention", "conv", "memory", "launch_us", "kernel_us", "sm_gb_per_s")
_BOUNDS = ((0.005, 2.0),) * 4 + ((0.01, 1000.0),) * 2 + ((0.1, 10_000.0),)
_KINDS = {OperatorKind.MATMUL: 0, OperatorKind.ATTENTION: 1, OperatorKind.CONV: 2}
_MEMORY, _LAUNCH, _KERNEL, _DRAWN = 3, 4, 5, 6
_MIN_SLOPE = np.array([1e-6, 1e-6, 1e-6, 1e-6, 0.05, 0.05, 1e-6])
"""How far some time has to follow a factor so that it is told: of both clocks, every time has a little."""
_OUTLIER = 0.1
_MAX_FOLDS = 8

_LEVEL = np.array([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 0.0])
"""How factors move together where everything is slower."""
_LEVEL_SIGMA, _MISFIT = 2.0, 0.2
"""Prior standard deviation of that, and how far a module is off whatever the factors; of logarithms."""
_FREEDOMS = (
    ("one speed for everything", 0.02),
    ("each kind, tightly", 0.15),
    ("each kind", 0.5),
    ("each kind, freely", 2.0),
)
"""What may change, and the prior standard deviation of each factor's own logarithm."""
NOTHING = "nothing"
"""What changes where no fit predicts left-out modules better."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTime:
    """One measured time of counted operators."""

    module: str
    """Whose operators these are: all of a module are left out together."""
    counts: PhaseCounts
    """Its operators; without any that send to other devices."""
    quota: int
    """Slots it ran on."""
    measured_ms: float
    """Time in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A description with its efficiencies set, and what that changed."""

    hardware: Hardware
    """The description."""
    error_before: float
    """Error over the measurements, before."""
    error_held_out: float
    """Error on modules that a fit of the same freedom did not see; that from before where nothing changed."""
    freedom: str
    """What was allowed to change: ``nothing``, ``one speed for everything``, ``each kind``, ..."""
    untold: tuple[str, ...] = ()
    """Factors that no measurement tells anything about; they stay as described."""


def calibrate(hardware: Hardware, measurements: Sequence[CountedTime]) -> Calibrated:
    """Fits efficiencies, both times of a kernel and bandwidth of an SM to measured times; peaks are not touched.

    Times of a kernel and bandwidth of an SM are told apart from the efficiencies only by small kernels and small
    quotas, and the host's from the GPU's only by times that either of them paces.

    Raises:
        ValueError: There are fewer than six measurements.
    """
    if len(measurements) < MIN_MEASUREMENTS:
        raise ValueError(
            f"calibration of {hardware.name} needs at least {MIN_MEASUREMENTS} measurements, there are "
            f"{len(measurements)}: measure more kernels, sizes or quotas"
        )
    work = _Work(hardware, measurements)
    start = _factors(hardware)
    before = work.error(start)
    freedom, sigma, held_out = _choose_freedom(work, start)
    found = start if sigma is None else work.fit(start, np.arange(len(measurements)), sigma)
    if work.error(found) > before:  # what is minimised is not quite the error
        freedom, found, held_out = NOTHING, start, before
    changed = bool((np.abs(found - start) > 1e-9).any())
    return Calibrated(
        hardware=_with_factors(hardware, found, len(measurements)) if changed else hardware,
        error_before=before,
        error_held_out=held_out,
        freedom=freedom,
        untold=tuple(name for name, told in zip(_FACTORS, work.told(start), strict=True) if not told),
    )


def measurements_of(profile: Profile, counts: Mapping[str, ModuleCounts]) -> tuple[CountedTime, ...]:
    """Returns what a profile measured at degree 1 of modules that were counted, phase by phase."""
    return tuple(
        CountedTime(
            module=sample.module,
            counts=counts[sample.module].phase(sample.phase),
            quota=sample.quota,
            measured_ms=sample.median_ms,
        )
        for sample in profile.samples
        if sample.module in counts
        and sample.degree == 1
        and sample.times_ms
        and sample.median_ms > 0
        and counts[sample.module].phase(sample.phase).operators
    )


def mean_error(log_ratios: Vector) -> float:
    """Returns the error (see the head of this file) of predictions whose log(predicted / measured) are given."""
    return float(np.expm1(np.abs(log_ratios).mean()))


class _Work:
    """Measurements as arrays, one entry for each kind of call in each of them."""

    def __init__(self, hardware: Hardware, measurements: Sequence[CountedTime]) -> None:
        self._measured = np.array([measurement.measured_ms for measurement in measurements])
        self._peak = hardware.memory_gb_per_s
        self._on_host = hardware.kind == "host"
        self.groups = _groups(measurements)
        sizes = np.bincount(self.groups)
        self._weights = 1.0 / sizes[self.groups]
        owner, kind, compute, moved, sms, calls, kernels = [], [], [], [], [], [], []
        for index, measurement in enumerate(measurements):
            num_sms = measurement.quota * hardware.sms_per_slot
            for operator in measurement.counts.operators:
                owner.append(index)
                kind.append(_KINDS.get(operator.kind, _MEMORY))
                compute.append(ideal_time(operator, hardware, num_sms).compute_ms)
                moved.append(operator.moved_bytes / 1e6)
                sms.append(num_sms)
                calls.append(operator.calls)
                kernels.append(operator.kernels * operator.calls / 1e3)
        self._owner, self._kind = np.array(owner), np.array(kind)
        self._compute, self._moved = np.array(compute), np.array(moved)
        self._sms, self._calls, self._kernels = np.array(sms), np.array(calls), np.array(kernels)
        self._each = np.maximum(1.0, 1e3 * self._sum(self._kernels))

    def _sum(self, values: Vector) -> Vector:
        found: Vector = np.bincount(self._owner, weights=values, minlength=len(self._measured))
        return found

    def ratios(self, factors: Vector) -> Vector:
        """Returns log(predicted / measured) of every measurement; ``factors`` are logarithms."""
        value = np.exp(factors)
        drawn = np.minimum(self._peak, self._sms * value[_DRAWN]) * value[_MEMORY]
        slowest = np.maximum(self._compute / value[self._kind], self._moved / drawn)
        device = self._sum(self._calls * slowest + (0.0 if self._on_host else self._kernels * value[_KERNEL]))
        launch = self._sum(self._kernels * value[_LAUNCH])
        # As ``roofline.clocks_of``.
        line = np.maximum(launch + device / self._each, launch / self._each + device)
        predicted = launch + device if self._on_host else line
        ratios: Vector = np.log(np.maximum(predicted, 1e-9) / self._measured)
        return ratios

    def error(self, factors: Vector) -> float:
        """Returns the error over all measurements."""
        return mean_error(self.ratios(factors))

    def slopes(self, factors: Vector) -> Vector:
        """Returns d log(predicted) / d log(factor), one row a measurement."""
        steps = np.eye(len(factors)) * 1e-4
        rows = [(self.ratios(factors + step) - self.ratios(factors - step)) / 2e-4 for step in steps]
        slopes: Vector = np.stack(rows, axis=1)
        return slopes

    def told(self, factors: Vector) -> NDArray[np.bool_]:
        """Returns which factors some measurement tells of."""
        enough: NDArray[np.bool_] = np.abs(self.slopes(factors)).max(axis=0) > _MIN_SLOPE
        return enough

    def fit(self, start: Vector, chosen: NDArray[np.intp], sigma: float) -> Vector:
        """Returns the factors that suit the chosen measurements best (Levenberg-Marquardt, reweighted).

        Args:
            start: Where to start, and towards what to pull.
            chosen: Measurements.
            sigma: Prior standard deviation of each factor by itself.
        """
        low, high = np.log(np.array(_BOUNDS)).T
        moving = np.abs(self.slopes(start)[chosen]).max(axis=0) > _MIN_SLOPE
        own = np.where(moving, sigma**2, 0.0)
        spread = np.diag(own) + _LEVEL_SIGMA**2 * np.outer(_LEVEL * moving, _LEVEL * moving)
        pull: Vector = (_MISFIT**2 * np.linalg.pinv(spread, hermitian=True)).astype(np.float64)
        found, damping = np.clip(start, low, high), 1e-2
        best = self._loss(found - start, found, chosen, pull)
        for _ in range(100):
            left, slopes = self.ratios(found)[chosen], self.slopes(found)[chosen] * moving
            weights = self._weights[chosen] / np.sqrt(1 + (left / _OUTLIER) ** 2)
            normal = slopes.T @ (weights[:, None] * slopes) + pull + 1e-9 * np.eye(len(start))
            downhill = slopes.T @ (weights * left) + pull @ (found - start)
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill) * moving
            tried = np.clip(found - step, low, high)
            loss = self._loss(tried - start, tried, chosen, pull)
            if loss >= best:
                damping *= 4
                if damping > 1e6:
                    break
                continue
            found, best, damping = tried, loss, max(damping / 3, 1e-6)
        return found

    def _loss(self, moved: Vector, factors: Vector, chosen: NDArray[np.intp], pull: Vector) -> float:
        left = self.ratios(factors)[chosen]
        robust = _OUTLIER**2 * (np.sqrt(1 + (left / _OUTLIER) ** 2) - 1)
        return float((self._weights[chosen] * robust).sum() + moved @ pull @ moved / 2)


def _groups(measurements: Sequence[CountedTime]) -> NDArray[np.intp]:
    """Numbers the modules; the measurements of a single one stand each for itself."""
    modules = [measurement.module for measurement in measurements]
    distinct = list(dict.fromkeys(modules))
    return np.array([distinct.index(name) for name in modules]) if len(distinct) > 1 else np.arange(len(modules))


def _choose_freedom(work: _Work, start: Vector) -> tuple[str, float | None, float]:
    """Returns what may change, the prior standard deviation for it, and the error on modules left out.

    From nothing to all; a freer one takes over where its gain over the modules is above its standard error.
    """
    folds = work.groups % _MAX_FOLDS
    chosen: tuple[str, float | None] = (NOTHING, None)
    least = np.abs(work.ratios(start))
    for name, sigma in _FREEDOMS:
        ratios = np.zeros(len(least))
        for fold in range(int(folds.max()) + 1):
            found = work.fit(start, np.flatnonzero(folds != fold), sigma)
            ratios[folds == fold] = work.ratios(found)[folds == fold]
        left = np.abs(ratios)
        sizes = np.bincount(work.groups)
        gains = np.bincount(work.groups, weights=least - left) / sizes
        error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        if gains.mean() > error:
            chosen, least = (name, sigma), left
    return *chosen, mean_error(least)


def _factors(hardware: Hardware) -> Vector:
    reached = hardware.efficiency
    values = (reached.matmul, reached.attention, reached.conv, reached.memory)
    times = [max(time, _BOUNDS[_LAUNCH][0]) for time in (hardware.launch_us, hardware.kernel_us)]
    factors: Vector = np.log(np.array([*values, *times, hardware.sm_gb_per_s]))
    return factors


def _with_factors(hardware: Hardware, factors: Vector, count: int) -> Hardware:
    low, high = np.array(_BOUNDS).T
    matmul, attention, conv, memory, launch_us, kernel_us, sm_gb_per_s = map(float, np.clip(np.exp(factors), low, high))
    return dataclasses.replace(
        hardware,
        source=f"{hardware.source}; efficiencies calibrated on {count} measurements",
        launch_us=launch_us,
        kernel_us=hardware.kernel_us if hardware.kind == "host" else kernel_us,
        sm_gb_per_s=sm_gb_per_s,
        efficiency=dataclasses.replace(
            hardware.efficiency, matmul=matmul, attention=attention, conv=conv, memory=memory
        ),
    )
