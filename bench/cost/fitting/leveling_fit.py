"""Finding the coefficients of our form of interference (``Leveling``) from modules that ran side by side.

The form bends, so this is damped least squares of relative errors of times, from two starts, with
the draw of one module after the other moved over a grid in between, because a draw that is far off may show no slope. A
weak prior keeps what the groups do not tell near what is usual: a module's draw near the device's, everything else near
the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.cost.fitting.crowd import Crowds, guesses_of, typical_draw
from bench.cost.fitting.least_squares import Matrix, damped, jacobian
from bench.cost.fitting.observation import Observation, ObservationTable
from mosaic.cost.interference.leveling import Leveling
from mosaic.errors import InvalidProfileError

NAMES = ("capacity", "fairness", "cache", "idle", "draw")
"""Coefficients of a device; after these come the draws of the modules. Draws are fitted as logarithms."""

_LOW = (0.2, 0.0, 0.0, 0.0, math.log(1e-3))
_HIGH = (1.5, 1.0, 2.0, 1.0, 0.0)
_USUAL = (1.0, 0.5, 0.0, 1.0)
_SPREAD = (0.5, 1.0, 0.5, 1.0, 1.0)  # standard deviations of the prior
_MODULE_SPREAD = 0.6  # of a module's draw around the device's, in logarithms: within a factor of 1.8
_ERROR = 0.02  # standard deviation of a measured relative time, against which the prior weighs
_DESIGN_SHIFTS = (-0.5, 0.5)
_STARTS = (0.15, 0.85)  # fairness
_SWEEPS = 3
_GRID = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Leveled:
    """Our form, fitted."""

    values: Matrix
    """``NAMES``, and then the draw of each module; draws as logarithms."""
    modules: tuple[str, ...]
    """Modules of the groups."""

    @property
    def leveling(self) -> Leveling:
        """The coefficients, to predict with."""
        first = len(NAMES)
        found = dict(zip(NAMES, self.values[:first].tolist(), strict=True))
        draws = dict(zip(self.modules, np.exp(self.values[first:]).tolist(), strict=True))
        return Leveling(**{**found, "draw": math.exp(found["draw"])}, draws=draws)

    def extra_ms(self, seen: ObservationTable) -> Matrix:
        """Returns the predicted extra times, in milliseconds."""
        shares = _extra_shares(self.values[None], Crowds.of(seen.seen.tolist(), self.modules))[0]
        found: Matrix = shares * seen.alone_ms
        return found


def why_not_leveled(seen: ObservationTable) -> str | None:
    """Returns why there are too few groups for our form; None where there are enough."""
    groups = len(seen.groups)
    if groups > len(NAMES):
        return None
    return (
        f"{groups} groups of modules for the coefficients {', '.join(NAMES)}; measure at least "
        f"{len(NAMES) + 1 - groups} more groups side by side"
    )


def fit_leveled(seen: ObservationTable, *, near: Leveled | None = None) -> Leveled:
    """Fits our form to observations of one phase.

    Args:
        seen: What was measured.
        near: A fit to start from, such as that to all of the groups of which some are left out now; much faster.

    Raises:
        InvalidProfileError: There are too few groups; says how many are missing.
    """
    complaint = why_not_leveled(seen)
    if complaint is not None:
        raise InvalidProfileError(complaint)
    problem = _Problem.of(seen)
    starts = [problem.start(fairness) for fairness in _STARTS] if near is None else [problem.taken_from(near)]
    found = [damped(problem.residuals, start, problem.low, problem.high) for start in starts]
    if near is None:
        found = [problem.swept(*one) for one in found]
    values, _ = min(found, key=lambda one: one[1])
    return Leveled(values=values, modules=problem.modules)


def slopes(seen: Sequence[Observation], modules: Sequence[str], num_slots: int) -> Matrix:
    """Returns what coefficients change of each observation's time near usual values: ``NAMES`` and modules' draws.

    For the design of measurements: averaged in size over draws below and above what is typical.
    """
    crowds = Crowds.of(seen, modules)
    draw = math.log(typical_draw(num_slots))
    found: list[Matrix] = []
    for shift in _DESIGN_SHIFTS:
        at = np.array([*_USUAL, *[min(0.0, draw + shift)] * (1 + len(modules))])
        high = np.array([*_HIGH, *[_HIGH[-1]] * len(modules)])

        def residuals(values: Matrix) -> Matrix:
            return _extra_shares(values, crowds)

        found.append(jacobian(residuals, at, residuals(at[None])[0], high))
    mean: Matrix = np.mean(found, axis=0)
    # The device's draw is what modules without their own get; here all have theirs.
    return np.delete(mean, NAMES.index("draw"), axis=1)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Residuals of one phase, relative to the measured times, and of the prior."""

    crowds: Crowds
    modules: tuple[str, ...]
    extra: Matrix  # share of the time alone
    usual: Matrix
    low: Matrix
    high: Matrix

    @classmethod
    def of(cls, seen: ObservationTable) -> _Problem:
        found = seen.seen.tolist()
        modules = tuple(sorted({one.demand.module for one in found} | {d.module for o in found for d in o.beside}))
        crowds = Crowds.of(found, modules)
        num_slots = int((crowds.quota * crowds.is_there).sum(axis=1).max())
        draw = math.log(typical_draw(num_slots))
        count = len(modules)
        return cls(
            crowds,
            modules,
            seen.extra_ms / seen.alone_ms,
            np.array([*_USUAL, *[draw] * (1 + count)]),
            np.array([*_LOW, *[_LOW[-1]] * count]),
            np.array([*_HIGH, *[_HIGH[-1]] * count]),
        )

    def start(self, fairness: float) -> Matrix:
        values = self.usual.copy()
        values[NAMES.index("fairness")] = fairness
        return values

    def taken_from(self, near: Leveled) -> Matrix:
        first, law = near.values[: len(NAMES)], near.leveling
        return np.concatenate([first, np.log([law.draws.get(m, law.draw) for m in self.modules])])

    def residuals(self, values: Matrix) -> Matrix:
        """Of shape (guesses, observations and then coefficients)."""
        errors = (_extra_shares(values, self.crowds) - self.extra) / (1 + self.extra)
        return np.concatenate([errors, self._prior(values)], axis=1)

    def _prior(self, values: Matrix) -> Matrix:
        first = len(NAMES)
        device = (values[:, :first] - self.usual[:first]) / np.array(_SPREAD)
        modules = (values[:, first:] - values[:, first - 1 : first]) / _MODULE_SPREAD
        found: Matrix = _ERROR * np.concatenate([device, modules], axis=1)
        return found

    def swept(self, values: Matrix, cost: float) -> tuple[Matrix, float]:
        """Moves one module's draw after the other over a grid, and goes down from there, until little is gained."""
        grid = np.linspace(math.log(0.01), 0.0, _GRID)
        for _ in range(_SWEEPS):
            before = cost
            for place in range(len(NAMES), len(values)):
                trials = np.repeat(values[None], len(grid), axis=0)
                trials[:, place] = grid
                costs = (self.residuals(trials) ** 2).sum(axis=1)
                best = int(costs.argmin())
                if costs[best] < cost:
                    values, cost = trials[best], float(costs[best])
            values, cost = damped(self.residuals, values, self.low, self.high)
            if cost > 0.99 * before:
                break
        return values, cost


def _extra_shares(values: Matrix, crowds: Crowds) -> Matrix:
    first = len(NAMES)
    guess = guesses_of({name: values[:, index] for index, name in enumerate(NAMES[:-1])})
    draws = np.exp(np.concatenate([values[:, first:], values[:, first - 1 : first]], axis=1))
    return crowds.extra_shares(guess, draws)
