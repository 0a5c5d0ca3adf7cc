"""Fits of ``bench.cost`` and their errors: forms of interference to groups, descriptions of a device to times.

Fitted and judged are two sets. All forms of interference are fitted by one loss, the relative errors of every member's
time beside the others. Descriptions are fitted by the logarithm of predicted over measured time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from mosaic.cost import Eq8, Sharing
from mosaic.cost.counts import PhaseCounts
from mosaic.cost.interference import (
    FORMS,
    AssumedSharing,
    Coefficients,
    HasBandwidth,
    Interference,
    Neighbours,
)
from mosaic.cost.roofline import phase_ms
from mosaic.hardware import Hardware
from mosaic.hardware.description import MAX_EFFICIENCY
from mosaic.profile import PairSample, Phase

Vector = NDArray[np.float64]
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


class _AsWritten:
    """Eq. 8 as the paper has it: the same milliseconds for every module of a device; also below zero."""

    is_zero = False
    is_pairwise = False

    def __init__(self, coefficients: Mapping[Phase, Eq8], bandwidths: HasBandwidth) -> None:
        self._coefficients, self._bandwidths = coefficients, bandwidths

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        shares = [self._bandwidths.bandwidth(name, phase, 1, slots) for name, slots in ((module, quota), *beside)]
        return self._coefficients[phase].as_written_ms(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of interference to fit."""

    name: str
    """Name in ``FORMS``, or ``as written``."""
    start: tuple[float, ...] = ()
    """First guess of each coefficient of a phase."""
    low: tuple[float, ...] = ()
    """Least value of each coefficient."""
    make: Callable[..., Coefficients] | None = None
    """Coefficients of a phase from the numbers; None for a form without coefficients."""


STUDIED: Mapping[str, Form] = MappingProxyType(
    {
        "unaware of neighbours (0 coefficients)": Form(name="none"),
        "assumed where nothing is measured (0)": Form(name="pairwise", make=AssumedSharing),
        "measured pairs (one a pair)": Form(name="measured"),
        "pairwise (2)": Form(
            name="pairwise", start=(0.1, 0.1), low=(0.0, 0.0), make=lambda a, b: Sharing(pressure=a, product=b)
        ),
        "Eq. 8 without its product (2)": Form(
            name="eq8", start=(1e-3, 1e-2), low=(-_FAR, 0.0), make=lambda a, b: Eq8(e1=a, e2=b)
        ),
        "Eq. 8 as written (3)": Form(
            name="as written",
            start=(1e-3, 1e-2, 1e-2),
            low=(-_FAR, 0.0, 0.0),
            make=lambda a, b, c: Eq8(e1=a, e2=b, e3=c),
        ),
        "Eq. 8 fit for planning (3)": Form(
            name="eq8",
            start=(1e-3, 1e-2, 1e-2),
            low=(-_FAR, 0.0, 0.0),
            make=lambda a, b, c: Eq8(e1=a, e2=b, e3=c),
        ),
    }
)
"""Forms by what figures call them, with the number of free coefficients of each phase."""


def fit_form(
    form: Form, groups: Sequence[Group], bandwidths: HasBandwidth, pairs: Sequence[PairSample] = ()
) -> Interference:
    """Fits a form to groups, each phase by itself.

    Raises:
        ValueError: A phase has no more members than the form has coefficients, or no pairs were measured.
    """
    if form.name == "measured" and not pairs:
        raise ValueError("no pairs were measured")

    def made(coefficients: Mapping[Phase, Coefficients]) -> Interference:
        if form.name == "as written":
            return _AsWritten(coefficients, bandwidths)  # type: ignore[arg-type]
        return FORMS[form.name](pairs, coefficients, bandwidths)

    make = form.make
    if make is None:
        return made({})
    coefficients = {}
    for phase in Phase:
        of_phase = [group for group in groups if group[0].phase is phase]
        members = sum(map(len, of_phase))
        if form.start and of_phase and members <= len(form.start):
            raise ValueError(f"{members} members of groups for {len(form.start)} coefficients; run more groups")
        if not form.start or not of_phase:
            coefficients[phase] = make(*form.start)
            continue

        def residuals(values: Vector, phase: Phase = phase, of_phase: Sequence[Group] = of_phase) -> Vector:
            return np.array(signed_errors(made({phase: make(*map(float, values))}), of_phase))

        found = least_squares(residuals, form.start, bounds=(form.low, [_FAR] * len(form.low)))
        coefficients[phase] = make(*map(float, found.x))
    return made(coefficients)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTime:
    """One measured time of counted operators."""

    counts: PhaseCounts
    num_sms: int
    """SMs that the operators ran on."""
    measured_ms: float


_KINDS = ("matmul", "attention", "conv", "memory")
FREEDOMS: Mapping[str, tuple[int, Callable[[Vector], Vector]]] = MappingProxyType(
    {
        "as described (0 coefficients)": (0, lambda moved: np.zeros(5)),
        "one speed for everything (1)": (1, lambda moved: moved[0] * np.array([1.0, 1.0, 1.0, 1.0, -1.0])),
        "one efficiency a kind, and launches (5)": (5, lambda moved: moved),
    }
)
"""Free numbers, and the logarithms of the factors that they come to: of four efficiencies, and of launches."""


def calibrate(hardware: Hardware, times: Sequence[CountedTime], freedom: str) -> Hardware:
    """Returns a description with factors fitted to measured times: least squares of log(predicted / measured)."""
    count, moves = FREEDOMS[freedom]
    if count == 0:
        return hardware

    def residuals(moved: Vector) -> Vector:
        other = _scaled(hardware, moves(moved))
        return np.array([_log_ratio(other, time) for time in times])

    return _scaled(hardware, moves(least_squares(residuals, np.zeros(count)).x))


def description_errors(hardware: Hardware, times: Sequence[CountedTime]) -> list[float]:
    """Returns the factor by which each predicted time is off, less one: exp(|log(predicted / measured)|) - 1."""
    return [math.exp(abs(_log_ratio(hardware, time))) - 1 for time in times]


def _scaled(hardware: Hardware, logs: Vector) -> Hardware:
    *kinds, launch = np.exp(np.clip(logs, -_FAR, math.log(100.0))).tolist()
    reached = {
        kind: min(MAX_EFFICIENCY, max(1e-6, getattr(hardware.efficiency, kind) * factor))
        for kind, factor in zip(_KINDS, kinds, strict=True)
    }
    return replace(
        hardware,
        efficiency=replace(hardware.efficiency, **reached),
        launch_us=hardware.launch_us * launch,
        kernel_us=hardware.kernel_us * launch,
    )


def _log_ratio(hardware: Hardware, time: CountedTime) -> float:
    return math.log(phase_ms(time.counts, hardware, time.num_sms) / time.measured_ms)
