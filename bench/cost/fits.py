"""Fits forms of interference to groups, and counted times to a device.

Fitting and evaluation use disjoint sets. All forms minimize relative errors of members' times beside the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

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
DrawnShare = Callable[[str, Phase, int], float]
"""The share of the device's memory bandwidth that a module uses alone in a phase at a quota: the paper's B."""
Fit = dict[Phase, Sequence[float]]
"""Coefficients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of interference to fit; without ``start`` it has no coefficients."""

    extra_ms: Callable[[Sequence[float], float, float, Sequence[float]], float]
    """Slowdown of a module from coefficients, its time alone, its B and that of each neighbour."""
    start: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    """Lower bound of each coefficient."""


STUDIED: Mapping[str, Form] = MappingProxyType(
    {
        "unaware of neighbours (0 coefficients)": Form(extra_ms=lambda c, alone_ms, own, others: 0.0),
        "pairwise (2)": Form(
            extra_ms=lambda c, alone_ms, own, others: alone_ms * (c[0] + c[1] * own) * sum(others),
            start=(0.1, 0.1),
            low=(0.0, 0.0),
        ),
        "Eq. 8 as written (3)": Form(
            extra_ms=lambda c, alone_ms, own, others: (
                c[0] + c[1] * sum(others, own) + c[2] * math.prod(others, start=own)
            ),
            start=(1e-3, 1e-2, 1e-2),
            low=(-_FAR, 0.0, 0.0),
        ),
    }
)
"""Forms by figure name, with the number of coefficients per phase."""


def fit_form(form: Form, groups: Sequence[Group], drawn: DrawnShare) -> Fit:
    """Fits a form to groups, separately per phase.

    Raises:
        ValueError: A phase has too few members for the form's coefficients.
    """
    fit: Fit = {}
    for phase in Phase:
        of_phase = [group for group in groups if group[0].phase is phase]
        members = sum(map(len, of_phase))
        if form.start and of_phase and members <= len(form.start):
            raise ValueError(f"{members} members for {len(form.start)} coefficients; run more groups")
        fit[phase] = form.start
        if form.start and of_phase:

            def residuals(
                values: NDArray[np.float64], phase: Phase = phase, of_phase: Sequence[Group] = of_phase
            ) -> NDArray[np.float64]:
                return np.array(signed_errors(form, {phase: values.tolist()}, of_phase, drawn))

            bounds = (form.low, [_FAR] * len(form.low))
            fit[phase] = least_squares(residuals, form.start, bounds=bounds).x.tolist()
    return fit


def signed_errors(form: Form, fit: Fit, groups: Sequence[Group], drawn: DrawnShare) -> list[float]:
    """Returns the relative error of each member's predicted time."""
    errors = []
    for group in groups:
        shares = [drawn(member.module, member.phase, member.quota) for member in group]
        for index, member in enumerate(group):
            others = (*shares[:index], *shares[index + 1 :])
            extra_ms = form.extra_ms(fit[member.phase], member.alone_ms, shares[index], others)
            errors.append((member.alone_ms + extra_ms) / member.beside_ms - 1)
    return errors


def counted_errors(fit: Sequence[float], judge: Sequence[float]) -> dict[str, list[float]]:
    """Returns the relative errors of counted times: as described, and scaled by the fit's mean error.

    Args:
        fit: Logarithms of predicted over measured times.
        judge: The same for other modules.
    """
    speed = statistics.fmean(fit) if fit else 0.0
    return {
        words: [math.exp(abs(error - shift)) - 1 for error in judge]
        for words, shift in (("as described (0 coefficients)", 0.0), ("one speed for everything (1)", speed))
    }
