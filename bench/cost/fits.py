"""Forms of interference fitted to groups, and counted times to a device: simple forms and their errors.

Fitted and judged are two sets. All forms are fitted by one loss, the relative errors of every member's time beside the
others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from mosaic.cost import Eq8, Sharing
from mosaic.cost.interference import HasBandwidth, Interference, Neighbours, NoInterference, PairwiseInterference
from mosaic.profile import Phase

_FAR = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One module of a group that ran side by side, in one phase."""

    module: str
    phase: Phase
    quota: int
    """Slots."""
    alone_ms: float
    """Time at this quota without neighbours."""
    beside_ms: float
    """Time while all other members keep running."""


Group = tuple[Member, ...]


class _AsWritten(Interference):
    """Eq. 8 as the paper has it: the same milliseconds for every module of a device; also below zero."""

    is_zero = False

    def __init__(self, coefficients: Mapping[Phase, Eq8], bandwidths: HasBandwidth) -> None:
        self._coefficients, self._bandwidths = coefficients, bandwidths

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        shares = [self._bandwidths.bandwidth(name, phase, 1, slots) for name, slots in ((module, quota), *beside)]
        return self._coefficients[phase].as_written_ms(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of interference to fit."""

    make: Callable[..., Any]
    """Coefficients of a phase from the numbers."""
    join: Callable[[Mapping[Phase, Any], HasBandwidth], Interference]
    """The interference of all phases."""
    start: tuple[float, ...]
    low: tuple[float, ...]
    """Least value of each coefficient."""


STUDIED: Mapping[str, Form | None] = MappingProxyType(
    {
        "unaware of neighbours (0 coefficients)": None,
        "pairwise (2)": Form(
            make=lambda a, b: Sharing(pressure=a, product=b),
            join=PairwiseInterference,
            start=(0.1, 0.1),
            low=(0.0, 0.0),
        ),
        "Eq. 8 as written (3)": Form(
            make=lambda e1, e2, e3: Eq8(e1=e1, e2=e2, e3=e3),
            join=_AsWritten,
            start=(1e-3, 1e-2, 1e-2),
            low=(-_FAR, 0.0, 0.0),
        ),
    }
)
"""Forms by the words of figures, with the number of free coefficients of each phase."""


def fit_form(form: Form | None, groups: Sequence[Group], bandwidths: HasBandwidth) -> Interference:
    """Fits a form to groups, each phase by itself.

    Raises:
        ValueError: A phase has no more members than the form has coefficients.
    """
    if form is None:
        return NoInterference()
    coefficients = {}
    for phase in Phase:
        of_phase = [group for group in groups if group[0].phase is phase]
        members = sum(map(len, of_phase))
        if of_phase and members <= len(form.start):
            raise ValueError(f"{members} members of groups for {len(form.start)} coefficients; run more groups")

        def residuals(
            values: NDArray[np.float64], phase: Phase = phase, of_phase: Sequence[Group] = of_phase
        ) -> NDArray[np.float64]:
            fitted = form.join({phase: form.make(*map(float, values))}, bandwidths)
            return np.array(signed_errors(fitted, of_phase))

        bounds = (form.low, [_FAR] * len(form.low))
        values = least_squares(residuals, form.start, bounds=bounds).x.tolist() if of_phase else form.start
        coefficients[phase] = form.make(*values)
    return form.join(coefficients, bandwidths)


def signed_errors(form: Interference, groups: Sequence[Group]) -> list[float]:
    """Returns the relative error of each member's predicted time."""
    errors = []
    for group in groups:
        placed = [(member.module, member.quota) for member in group]
        for index, member in enumerate(group):
            beside = (*placed[:index], *placed[index + 1 :])
            extra_ms = form.extra_ms(
                member.module, member.phase, quota=member.quota, alone_ms=member.alone_ms, beside=beside
            )
            errors.append((member.alone_ms + extra_ms) / member.beside_ms - 1)
    return errors


def counted_errors(fit: Sequence[float], judge: Sequence[float]) -> dict[str, list[float]]:
    """Returns the factors by which counted times are off, less one: as described, and scaled by the fit's mean error.

    Args:
        fit: Logarithms of predicted over measured times.
        judge: The same of other modules.
    """
    speed = statistics.fmean(fit) if fit else 0.0
    return {
        words: [math.exp(abs(error - shift)) - 1 for error in judge]
        for words, shift in (("as described (0 coefficients)", 0.0), ("one speed for everything (1)", speed))
    }
