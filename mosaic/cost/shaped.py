"""The scaling surface whose course between samples comes from counted operators (``ShapePosterior``).

At a sample it is the sample's median, as everywhere (``QuotaCurve``). Between two samples it is what the posterior
expects, moved as far as the samples lie from it beyond noise; it neither leaves what both samples say nor rises with
the quota. Where there are samples enough to tell, the form that predicts left-out ones worse gives way.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mosaic.cost.surfaces.curve import NOISE_FLOOR, QuotaCurve
from mosaic.cost.surfaces.posterior import ShapePosterior
from mosaic.cost.surfaces.sampling import MakeSurface, omission_errors
from mosaic.cost.surfaces.surface import ScalingSurface
from mosaic.profile import Sample
from mosaic.shape import ModuleShape

_ENOUGH = 5
"""Samples of a curve from which on leaving one out does not leave a hole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedCurve:
    """Time over quota at one degree."""

    quotas: tuple[int, ...]
    """Sampled quotas in slots, rising."""
    times_ms: tuple[float, ...]
    """At every quota from the first to the last of these, in milliseconds."""

    @classmethod
    def bend(cls, plain: QuotaCurve, expected: ShapePosterior, sample: Sample) -> ShapedCurve:
        """Follows the posterior between the knots of a plain curve; ``sample`` tells phase and degree."""
        off = {}
        for quota, knot in zip(plain.quotas, plain.knots_ms, strict=True):
            beyond = math.log(knot / expected.ms(sample.phase, sample.degree, quota))
            off[quota] = math.copysign(max(0.0, abs(beyond) - NOISE_FLOOR), beyond)
        times = list(plain.knots_ms[:1])
        for (left, first), (right, last) in itertools.pairwise(zip(plain.quotas, plain.knots_ms, strict=True)):
            for quota in range(left + 1, right):
                share = math.log(quota / left) / math.log(right / left)
                moved = math.exp((1 - share) * off[left] + share * off[right])
                time = expected.ms(sample.phase, sample.degree, quota) * moved
                low, high = sorted((first, last))
                time = min(max(time, low), high)
                times.append(min(time, times[-1]) if last <= first else time)
            times.append(last)
        return cls(quotas=plain.quotas, times_ms=tuple(times))

    def ms(self, quota: int) -> float:
        """Returns the time in milliseconds; ``quota`` lies between the first and the last sampled one."""
        return self.times_ms[quota - self.quotas[0]]


class ShapedSurface(ScalingSurface):
    """Time of one phase of one module over (degree, quota), in the shape that its operators have."""

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        shape: ModuleShape | None,
        others: Iterable[Sample] = (),
        choose: bool = True,
    ) -> None:
        """Fits a surface to samples that all are of one module and phase.

        Args:
            samples: Of one module and phase.
            shape: Of this module; without one, this is a ``ScalingSurface``.
            others: Samples of the module's other phase, which tell of this one.
            choose: Whether the plain form may take over where it predicts left-out samples better.

        Raises:
            InvalidProfileError: As ``ScalingSurface``.
        """
        super().__init__(samples)
        if shape is None or self._is_zero:
            return
        others = tuple(others)
        posterior = ShapePosterior(shape, (*samples, *others))
        if posterior.is_refuted:
            return
        for degree, curve in self._curves.items():
            of_degree = [s for s in self._samples[degree] if s.infeasible is None]
            between = range(curve.quotas[0], curve.quotas[-1] + 1)
            if not isinstance(curve, QuotaCurve) or not all(
                posterior.covers(self.phase, degree, quota) for quota in between
            ):
                continue
            if choose and len(of_degree) >= _ENOUGH and _plain_is_better(of_degree, shape, others):
                continue
            self._curves[degree] = ShapedCurve.bend(curve, posterior, of_degree[0])


def shaped_without(shape: ModuleShape | None, others: Iterable[Sample], *, choose: bool = True) -> MakeSurface:
    """Returns what makes surfaces of samples of which some were left out, for ``held_out_errors``.

    Both phases of a point are measured together, so the other phase's sample of a point is left out with it.

    Args:
        shape: Of the module.
        others: Samples of its other phase.
        choose: See ``ShapedSurface``.
    """
    others = tuple(others)

    def make(rest: Sequence[Sample]) -> ShapedSurface:
        degrees, kept = {s.degree for s in rest}, {(s.degree, s.quota) for s in rest}
        theirs = [o for o in others if o.degree not in degrees or (o.degree, o.quota) in kept]
        return ShapedSurface(rest, shape=shape, others=theirs, choose=choose)

    return make


def _plain_is_better(samples: Sequence[Sample], shape: ModuleShape, others: Sequence[Sample]) -> bool:
    plain = omission_errors(samples, ScalingSurface)
    bent = omission_errors(samples, shaped_without(shape, others, choose=False))
    return bool(plain) and statistics.fmean(plain) < statistics.fmean(bent)
