"""What measurements leave open of a module's shape: Gaussian conditioning, in logarithms of time.

The covariance of the prior is that of its modes, shared by all phases and degrees of the module, plus what no
description knows: the level of each phase, and smooth and rough differences of a few percent. So a forward that was
measured tells of the backward, one degree of another, and a sample of all quotas that hang together with it. The
algebra is that of kriging (Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, Eq. 2.25-2.26).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mosaic.cost.interference.fitting.least_squares import Matrix
from mosaic.profile import Phase, Sample
from mosaic.shape import ModuleShape

_LEVEL = 0.7
"""Standard deviation of the logarithm of a phase's level."""
_SMOOTH, _LENGTH, _ROUGH = 0.015, 0.7, 0.005
"""Differences that the modes do not have: standard deviation, correlation length in log(quota); and of each quota by
itself."""
_LEAST_NOISE = 0.005
"""A median of few measurements is never surer than this."""

_REFUTED = 3.0
"""Surprise from which on a shape is not that of the module: it spends its time on what was not counted."""

Point = tuple[str, int, int]
"""Phase, degree, quota."""


class ShapePosterior:
    """A module's time at all its quotas, phases and degrees, given samples of it.

    Attributes:
        surprise: How much farther the samples lie from what was expected of them than its standard deviations say; 1
            where they do not. Spreads are already larger by it.
    """

    def __init__(self, shape: ModuleShape, samples: Iterable[Sample]) -> None:
        """Conditions a shape on the samples that it covers; others are not used."""
        self.shape = shape
        self._at: dict[Point, int] = {}
        for curve in shape.curves:
            for quota in shape.quotas:
                self._at[curve.phase, curve.degree, quota] = len(self._at)
        self._mean = np.concatenate([curve.log_ms for curve in shape.curves])
        self._covariance = _covariance(shape)
        self._seen = [s for s in samples if s.times_ms and s.median_ms > 0 and self.covers(s.phase, s.degree, s.quota)]
        self.surprise = 1.0
        if self._seen:
            self._condition(self._seen)

    @property
    def is_refuted(self) -> bool:
        """Whether the samples say that this is not the module's shape; then it is not to be used."""
        return self.surprise > _REFUTED

    def covers(self, phase: Phase, degree: int, quota: int) -> bool:
        """Whether the shape has this point."""
        return (phase.value, degree, quota) in self._at

    def ms(self, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time that is expected, in milliseconds."""
        return float(np.exp(self._mean[self._at[phase.value, degree, quota]]))

    def spread(self, phase: Phase, degree: int, quota: int) -> float:
        """Returns the relative standard deviation of the time at a quota that is not measured."""
        return float(self._spreads(np.array([self._at[phase.value, degree, quota]]))[0])

    def next_quota(self, degree: int, candidates: Sequence[int], *, bound: float) -> int | None:
        """Returns the quota whose measurement, of both phases, leaves least open over all candidates.

        None where the spread is under ``bound`` at every candidate, or none is left.
        """
        tried = {sample.quota for sample in self._seen if sample.degree == degree}
        left = [quota for quota in candidates if quota not in tried and self._points(degree, [quota])]
        every = self._points(degree, left)
        if not left or self._spreads(np.array(every)).max() < bound:
            return None
        gains = []
        for quota in left:
            at = self._points(degree, [quota])
            noisy = self._covariance[np.ix_(at, at)] + _LEAST_NOISE**2 * np.eye(len(at))
            across = self._covariance[np.ix_(every, at)]
            gains.append(float(np.einsum("ij,ji->", across, np.linalg.solve(noisy, across.T))))
        return left[int(np.argmax(gains))]

    def _points(self, degree: int, quotas: Sequence[int]) -> list[int]:
        phases = {curve.phase for curve in self.shape.curves if curve.degree == degree}
        return [self._at[phase, degree, quota] for quota in quotas for phase in sorted(phases)]

    def _spreads(self, at: Matrix) -> Matrix:
        spreads: Matrix = self.surprise * np.sqrt(np.diag(self._covariance)[at].clip(0))
        return spreads

    def _condition(self, seen: Sequence[Sample]) -> None:
        at = [self._at[sample.phase.value, sample.degree, sample.quota] for sample in seen]
        noise = np.array([_noise_of(sample) for sample in seen])
        inner = self._covariance[np.ix_(at, at)] + np.diag(noise**2)
        left = np.log([sample.median_ms for sample in seen]) - self._mean[at]
        across = self._covariance[:, at]
        weights = np.linalg.solve(inner, across.T).T
        self._mean = self._mean + weights @ left
        self._covariance = self._covariance - weights @ across.T
        self.surprise = max(1.0, float(np.sqrt(left @ np.linalg.solve(inner, left) / len(seen))))


def _covariance(shape: ModuleShape) -> Matrix:
    modes = np.concatenate([np.array(curve.modes).reshape(len(curve.modes), -1) for curve in shape.curves], axis=1)
    place = np.log(np.array(shape.quotas, dtype=float))
    near = np.exp(-0.5 * ((place[:, None] - place[None]) / _LENGTH) ** 2)
    same_phase = np.array([[a.phase == b.phase for b in shape.curves] for a in shape.curves])
    covariance: Matrix = modes.T @ modes + _LEVEL**2 * np.kron(same_phase, np.ones_like(near))
    own = _SMOOTH**2 * near + _ROUGH**2 * np.eye(len(place))
    return covariance + np.kron(np.eye(len(shape.curves)), own)


def _noise_of(sample: Sample) -> float:
    """Relative standard error of a median, from its quartiles."""
    first, third = sample.quartiles_ms
    # 1.35 quartile distances to a standard deviation; a median is 1.25 times as uncertain as a mean.
    error = (third - first) / 1.35 * 1.25 / sample.median_ms / len(sample.times_ms) ** 0.5
    return max(_LEAST_NOISE, float(error))
