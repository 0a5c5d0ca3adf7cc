"""Our form of interference for many groups and many guesses of its coefficients at once; what a fit needs.

The same equations as in ``mosaic.cost.interference.leveling``, on arrays; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.cost.fitting.least_squares import Matrix
from bench.cost.fitting.observation import Observation
from mosaic.cost.interference.leveling import MAX_IDLE, MIN_SHARE, Demand

_STEPS = 8
_TINY = 1e-12


class Guesses(NamedTuple):
    """Coefficients as in ``Leveling``, one a guess; shape (guesses, 1, 1)."""

    capacity: Matrix
    fairness: Matrix
    cache: Matrix
    idle: Matrix


@dataclass(frozen=True, slots=True)
class Crowds:
    """Groups as padded arrays of shape (groups, members)."""

    is_there: NDArray[np.bool_]
    """Whether a group has that many members."""
    share: Matrix
    """B of each member; 0 beyond the last."""
    fixed: Matrix
    """Fixed time of each, see ``Demand``."""
    quota: Matrix
    """Slots of each."""
    module: NDArray[np.int64]
    """Index of each in the list of modules; its length where the module is not in it."""
    place: NDArray[np.int64]
    """Where each observation's own module is, in the flattened arrays."""

    @classmethod
    def of(cls, seen: Sequence[Observation], modules: Sequence[str]) -> Crowds:
        """Puts observations of the same groups together."""
        rows: dict[tuple[int, tuple[Demand, ...]], int] = {}
        places = []
        for one in seen:
            members = tuple(sorted((one.demand, *one.beside), key=_order))
            row = rows.setdefault((one.group, members), len(rows))
            places.append((row, members.index(one.demand)))
        width = max((len(members) for _, members in rows), default=1)
        index = {name: number for number, name in enumerate(modules)}
        found = cls(
            np.zeros((len(rows), width), dtype=bool),
            np.zeros((len(rows), width)),
            np.zeros((len(rows), width)),
            np.ones((len(rows), width)),
            np.full((len(rows), width), len(modules), dtype=np.int64),
            np.array([row * width + column for row, column in places], dtype=np.int64),
        )
        for (_, members), row in rows.items():
            for column, member in enumerate(members):
                found.is_there[row, column] = True
                found.share[row, column] = member.share if member.share > MIN_SHARE else 0.0
                found.fixed[row, column] = member.fixed
                found.quota[row, column] = member.quota
                found.module[row, column] = index.get(member.module, len(modules))
        return found

    def extra_shares(self, guess: Guesses, draws: Matrix) -> Matrix:
        """Returns the extra share of each observation's time alone; shape (guesses, observations).

        Args:
            guess: Coefficients.
            draws: What one slot of each module can draw, and of any other last; shape (guesses, modules + 1).
        """
        idle = (guess.idle * self.fixed * self.share).clip(0, MAX_IDLE)
        ask = self.share / (1 - idle)
        growth = 1 + guess.cache * (self.share.sum(axis=1, keepdims=True) - self.share)
        cap = np.maximum(ask, (draws[:, self.module] * self.quota).clip(max=1.0)) * self.is_there
        level = _Levels(guess, idle, ask * growth, self.share * growth, cap)
        slowdown = level.slowdowns() / np.maximum(1.0, self.share / guess.capacity)
        extra: Matrix = (slowdown - 1).clip(0).reshape(len(slowdown), -1)[:, self.place]
        return extra


@dataclass(frozen=True, slots=True)
class _Levels:
    """Members with grown traffic; arrays of shape (guesses, groups, members)."""

    guess: Guesses
    idle: Matrix
    wanted: Matrix
    traffic: Matrix
    cap: Matrix

    def slowdowns(self) -> Matrix:
        """Returns times over those alone, at the level that fits all demand to the capacity."""
        capacity, fairness = self.guess.capacity, self.guess.fairness
        most = np.minimum(self.wanted, self.cap)
        at_one, drawn_at_one, _ = self._at(np.ones((*most.shape[:2], 1)), most)
        reach = ((1 - fairness) * most + fairness * self.cap).sum(axis=2, keepdims=True)
        level = np.minimum(1.0, capacity / np.maximum(reach, _TINY))
        for _ in range(_STEPS):
            _, drawn, slope = self._at(level, most)
            level = np.minimum(1.0, level + (capacity - drawn).clip(0) / np.maximum(slope, _TINY))
        found: Matrix = np.where(drawn_at_one <= capacity, at_one, self._at(level, most)[0])
        return found

    def _at(self, level: Matrix, most: Matrix) -> tuple[Matrix, Matrix, Matrix]:
        """Slowdowns at a level, what all draw together, and how steeply that rises."""
        fairness = self.guess.fairness
        fair = level * self.cap
        is_cut = fair < most
        rate = (1 - fairness) * level * most + fairness * np.where(is_cut, fair, most)
        rising = (1 - fairness) * most + fairness * np.where(is_cut, self.cap, 0.0)
        safe = np.where(rate > 0, rate, 1.0)
        slowdown = self.idle + (1 - self.idle) * np.where(rate > 0, np.maximum(1.0, self.wanted / safe), 1.0)
        drawn = self.traffic / slowdown
        slope = np.where(self.wanted > rate, (drawn / safe) ** 2 * rising, 0.0)
        return slowdown, drawn.sum(axis=2, keepdims=True), slope.sum(axis=2, keepdims=True)


def _order(demand: Demand) -> tuple[str, int]:
    return demand.module, demand.quota


def guesses_of(values: Mapping[str, float | Matrix]) -> Guesses:
    """Returns guesses from values by name, each a number or one number a guess."""

    def column(name: str) -> Matrix:
        return np.atleast_1d(np.asarray(values[name], dtype=np.float64))[:, None, None]

    return Guesses(column("capacity"), column("fairness"), column("cache"), column("idle"))


def typical_draw(num_slots: int) -> float:
    """Returns what one slot draws where nothing is known: a third of the slots draw the whole bandwidth."""
    return min(1.0, 3.0 / max(1, num_slots))
