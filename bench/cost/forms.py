"""Forms of interference as the study judges them: coefficients as numbers, fitted by one loss for all.

The loss is the mean square of relative errors of every member's time beside the others. Forms and what they predict are
the package's own (``mosaic.cost.interference``); beside them stands Eq. 8 exactly as the paper writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.cost.estimates import Vector, damped
from bench.cost.truth import Group, Truth
from mosaic.cost import Eq8, Leveling, Sharing
from mosaic.cost.interference.forms import FORMS
from mosaic.cost.interference.forms import Coefficients as Fittable
from mosaic.cost.interference.pairwise import AssumedSharing
from mosaic.cost.interference.protocol import HasBandwidth, Interference, Neighbours
from mosaic.hardware import find_hardware
from mosaic.profile import Phase

Coefficients = Fittable | AssumedSharing
Made = Callable[[Vector, Sequence[str]], Coefficients]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudiedForm:
    """One form with the range of its coefficients."""

    form: str
    """Name in the package's table; or ``AS_WRITTEN``."""
    words: str
    """In figures, with the number of coefficients that are free in each phase."""
    low: tuple[float, ...] = ()
    """Least of each coefficient."""
    high: tuple[float, ...] = ()
    """Most of each."""
    starts: tuple[tuple[float, ...], ...] = ()
    """First guesses."""
    draws: bool = False
    """Whether each fitted module has one more coefficient."""
    made: Made | None = None
    """Makes coefficients of numbers (and of the names of fitted modules); None where there are none to fit."""
    assumed: Coefficients | None = None
    """Taken as they are where nothing is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One form with its coefficients."""

    studied: StudiedForm
    """The form."""
    coefficients: Mapping[Phase, Coefficients]
    """By phase; none for a form without."""
    num_free: int
    """Numbers that were fitted or measured for it, in all phases."""

    def interference(self, truth: Truth) -> Interference:
        """Returns it over what the modules of a truth use alone."""
        if self.studied.form == AS_WRITTEN:
            return AsWritten(self.coefficients, truth.bandwidths)
        return FORMS[self.studied.form].make(truth.pairs, self.coefficients, truth.bandwidths)

    def errors(self, truth: Truth, groups: Sequence[Group]) -> list[float]:
        """Returns the relative error of each member's predicted time."""
        return [abs(error) for error in _errors(self.interference(truth), groups)]


AS_WRITTEN = "as written"


class AsWritten:
    """Eq. 8 as the paper has it: the same milliseconds for every module of a device, whoever they are beside."""

    is_zero = False
    is_pairwise = False

    def __init__(self, coefficients: Mapping[Phase, Coefficients], bandwidths: HasBandwidth) -> None:
        """Takes coefficients of each phase and what modules use alone."""
        self._coefficients, self._bandwidths = coefficients, bandwidths

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the equation over all modules; also below zero."""
        found = self._coefficients[phase]
        assert isinstance(found, Eq8)
        return found.as_written_ms(
            [self._bandwidths.bandwidth(name, phase, 1, slots) for name, slots in ((module, quota), *beside)]
        )


def _leveling(values: Vector, modules: Sequence[str]) -> Leveling:
    draw, capacity, fairness, cache, idle, *draws = values.tolist()
    own = dict(zip(modules, (math.exp(one) for one in draws), strict=False))
    return Leveling(
        draw=math.exp(draw), capacity=capacity, fairness=fairness, cache=cache, idle=idle, draws=own if draws else {}
    )


def _described() -> Leveling:
    """What an H100's description says: what a slot draws, and what kernels reach of the bandwidth alone."""
    gpu = find_hardware("h100-80g")
    reached = gpu.efficiency.memory
    slot = gpu.bandwidth_gb_per_s(gpu.sms_per_slot) / gpu.memory_gb_per_s
    return Leveling(draw=slot * reached, capacity=reached, fairness=0.0)


def _eq8(values: Vector, _: Sequence[str]) -> Eq8:
    return Eq8(**dict(zip(("e1", "e2", "e3"), values.tolist(), strict=False)))


_OURS = StudiedForm(
    form="ours",
    words="ours (5)",
    low=(math.log(1e-3), 0.2, 0.0, 0.0, 0.0),
    high=(0.0, 1.5, 1.0, 2.0, 1.0),
    starts=tuple((math.log(draw), 0.95, fair, 0.1, 0.8) for draw in (0.08, 0.25) for fair in (0.15, 0.85)),
    made=_leveling,
)
_FAR = 1e3

_EQ8 = StudiedForm(
    form="full",
    words="Eq. 8 fit for planning (3)",
    low=(-_FAR, 0.0, 0.0),
    high=(_FAR, _FAR, _FAR),
    starts=((1e-3, 1e-2, 1e-2),),
    made=_eq8,
)

STUDIED = (
    StudiedForm(form="none", words="unaware of neighbours (0 coefficients)"),
    StudiedForm(form="pairwise", words="assumed where nothing is measured (0)", assumed=AssumedSharing()),
    StudiedForm(form="pairwise", words="pairwise, halves (0)", assumed=Sharing(pressure=0.5, product=0.5)),
    StudiedForm(form="ours", words="ours as described (0)", assumed=_described()),
    StudiedForm(form="measured", words="measured pairs (one a pair)"),
    replace(
        _EQ8,
        form="additive",
        words="Eq. 8 without its product (2)",
        low=_EQ8.low[:2],
        high=_EQ8.high[:2],
        starts=((1e-3, 1e-2),),
    ),
    replace(_EQ8, form=AS_WRITTEN, words="Eq. 8 as written (3)"),
    _EQ8,
    StudiedForm(
        form="pairwise",
        words="pairwise (2)",
        low=(0.0, 0.0),
        high=(_FAR, _FAR),
        starts=((0.1, 0.1),),
        made=lambda values, _: Sharing(pressure=float(values[0]), product=float(values[1])),
    ),
    _OURS,
    replace(_OURS, words="ours with a draw a module (5 + one a module)", draws=True),
)
"""Every form of the package's table, and variants; those without coefficients were compared on other modules."""


def fit_form(studied: StudiedForm, truth: Truth) -> Fitted:
    """Fits one form to the groups that a truth has for it, each phase by itself.

    Raises:
        ValueError: There are no more members than coefficients; says how many there are.
    """
    phases = tuple(dict.fromkeys(member.phase for group in truth.fit for member in group))
    if studied.assumed is not None:
        return Fitted(studied=studied, coefficients=dict.fromkeys(Phase, studied.assumed), num_free=0)
    if studied.made is None:
        count = len(truth.pairs) if studied.form == "measured" else 0
        if studied.form == "measured" and not count:
            raise ValueError("no pairs were measured")
        return Fitted(studied=studied, coefficients={}, num_free=count)
    found: dict[Phase, Coefficients] = {}
    count = 0
    for phase in phases:
        groups = [group for group in truth.fit if group[0].phase is phase]
        modules = sorted({member.module for group in groups for member in group}) if studied.draws else []
        found[phase] = _fit_phase(studied, truth, groups, modules)
        count += len(studied.low) + len(modules)
    first = next(iter(found.values()))
    return Fitted(studied=studied, coefficients={phase: found.get(phase, first) for phase in Phase}, num_free=count)


def _fit_phase(studied: StudiedForm, truth: Truth, groups: Sequence[Group], modules: Sequence[str]) -> Coefficients:
    made, more = studied.made, len(modules)
    assert made is not None
    members = sum(map(len, groups))
    if members <= len(studied.low) + more:
        raise ValueError(f"{members} members of groups for {len(studied.low) + more} coefficients; run more groups")

    def residuals(values: Vector) -> Vector:
        of = Fitted(studied=studied, coefficients=dict.fromkeys(Phase, made(values, modules)), num_free=0)
        return np.array(_errors(of.interference(truth), groups))

    # A module's own draw starts at the device's, which comes first.
    wide = [np.array([*of, *of[:1] * more]) for of in (studied.low, studied.high, *studied.starts)]
    low, high, *starts = wide
    values, _ = min((damped(residuals, start, low, high) for start in starts), key=lambda one: one[1])
    return made(values, modules)


def _errors(form: Interference, groups: Sequence[Group]) -> list[float]:
    found = []
    for group in groups:
        placed = [(member.module, member.quota) for member in group]
        for index, member in enumerate(group):
            beside = (*placed[:index], *placed[index + 1 :])
            extra = form.extra_ms(
                member.module, member.phase, quota=member.quota, alone_ms=member.alone_ms, beside=beside
            )
            found.append((member.alone_ms + extra) / member.beside_ms - 1)
    return found
