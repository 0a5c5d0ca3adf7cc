"""How much of a device's memory bandwidth a module uses alone: B(m, a) of paper section 3.3, between the samples."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from mosaic.cost.interference.fixed_time import Timed, fixed_time
from mosaic.cost.interference.protocol import HasBandwidth
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample


class Bandwidths:
    """Measured shares of bandwidth, linear over the logarithm of the quota; estimated ones where there are none.

    A degree that was not sampled takes the nearest one that was: what a module uses of one device hardly depends
    on how many others it has (the paper's B has no degree at all).
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        *,
        estimate: HasBandwidth | None = None,
        idle: Iterable[tuple[str, Phase]] = (),
    ) -> None:
        """Collects the samples that have a ``bandwidth_utilisation``.

        Args:
            samples: Of any modules, phases, degrees and quotas.
            estimate: Asked for modules, phases and quotas without measurements.
            idle: Modules with phases in which they do nothing, such as the backward of a frozen one.
        """
        samples = tuple(samples)
        points: dict[tuple[str, Phase], dict[int, list[tuple[int, float]]]] = {}
        for sample in samples:
            if sample.bandwidth_utilisation is not None:
                by_degree = points.setdefault((sample.module, sample.phase), {})
                by_degree.setdefault(sample.degree, []).append((sample.quota, sample.bandwidth_utilisation))
        self._curves: Mapping[tuple[str, Phase], dict[int, list[tuple[int, float]]]] = {
            key: {degree: sorted(found) for degree, found in by_degree.items()} for key, by_degree in points.items()
        }
        self._estimate = estimate
        self._idle = frozenset(idle)
        self._times: dict[tuple[str, Phase], dict[int, list[Sample]]] = {}
        for sample in samples:
            if sample.infeasible is None:
                by_degree_ = self._times.setdefault((sample.module, sample.phase), {})
                by_degree_.setdefault(sample.degree, []).append(sample)
        self._fixed: dict[tuple[str, Phase], float] = {}

    def fixed(self, module: str, phase: Phase) -> float:
        """Returns how much of a module's time neither slots nor bandwidth make shorter; see ``fixed_time``.

        From the least degree that was sampled; 0 where there are too few quotas to tell.
        """
        key = (module, phase)
        if key not in self._fixed:
            by_degree = self._times.get(key, {})
            degree = min(by_degree, default=1)
            self._fixed[key] = fixed_time(
                [
                    Timed(sample.quota, sample.median_ms, self.bandwidth(module, phase, degree, sample.quota))
                    for sample in by_degree.get(degree, [])
                ]
            )
        return self._fixed[key]

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone uses, 0 to 1.

        Raises:
            InvalidProfileError: Nothing is known of the module's bandwidth in this phase.
            ValueError: ``quota`` lies outside what was measured, and there is no estimate.
        """
        if (module, phase) in self._idle:
            return 0.0
        by_degree = self._curves.get((module, phase))
        if by_degree is not None:
            nearest = min(by_degree, key=lambda sampled: (abs(math.log(sampled / degree)), sampled))
            found = _between(by_degree[nearest], quota)
            if found is not None:
                return found
        if self._estimate is not None:
            return min(1.0, max(0.0, self._estimate.bandwidth(module, phase, degree, quota)))
        if by_degree is None:
            raise InvalidProfileError(
                f"the bandwidth that {module!r} uses in its {phase} is not known; profile it with hardware counters, "
                "or give an analytic cost model as the estimate"
            )
        measured = ", ".join(str(at) for at, _ in by_degree[nearest])
        raise ValueError(
            f"bandwidth of {module!r} {phase}: a quota of {quota} slots lies outside the measured {measured}; "
            "measure it there too"
        )


def _between(points: list[tuple[int, float]], quota: int) -> float | None:
    if not points[0][0] <= quota <= points[-1][0]:
        return None
    right = bisect_left(points, quota, key=lambda point: point[0])
    high, last = points[right]
    if high == quota:
        return last
    low, first = points[right - 1]
    return first + (last - first) * math.log(quota / low) / math.log(high / low)
