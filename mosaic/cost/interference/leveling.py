"""Interference as bandwidth that runs out and is shared: our form.

What is assumed, and all of it can be wrong on a device:

* A module takes its launches and the like, which nobody makes longer, and for the rest the longer of its arithmetic
  and its memory traffic (a roofline; arithmetic and traffic overlap fully).
* Its slots can draw a limited rate (a slot has so many requests in flight), its *draw*. Who asks for less than its
  slots can draw has headroom, and is slowed down only when what it gets falls below what it asks.
* The device gives out no more than its *capacity*. One level, from 1 down, fits demand to it: the share ``fairness``
  of every rate is cut down to the level of what the slots could draw, with those below it left alone (max-min); the
  rest of the rate is cut in proportion to what is asked.
* Neighbours push data out of caches, so traffic grows by the share ``cache`` of the bandwidth that they use alone.
* Everyone keeps running, and bandwidth is even over time: groups are not told apart by when they draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from mosaic.cost.interference.protocol import HasBandwidth, Neighbours
from mosaic.profile import Phase

MAX_IDLE = 0.95
"""Most of a module's time alone that is taken to draw nothing."""

MIN_SHARE = 1e-9
"""A share below this is no demand."""

_STEPS = 60
_CLOSE = 1e-13


@runtime_checkable
class HasFixedTime(Protocol):
    """Bandwidths that also tell how much of a module's time neither slots nor bandwidth make shorter."""

    def fixed(self, module: str, phase: Phase) -> float:
        """Returns that time as a multiple of the time its traffic takes at the device's full bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One module on a device, as far as bandwidth is concerned."""

    module: str
    """Its name."""
    quota: int
    """Its slots."""
    share: float
    """Share of the device's bandwidth that it uses alone, over its whole time: B of Eq. 8."""
    fixed: float = 0.0
    """See ``HasFixedTime``; this times ``share`` is the part of its time that is fixed."""


def demand_of(bandwidths: HasBandwidth, module: str, phase: Phase, degree: int, quota: int) -> Demand:
    """Returns what a module asks of the bandwidth; no fixed time where nothing tells it.

    Raises:
        InvalidProfileError: Its bandwidth is not known.
        ValueError: It is not known at its quota.
    """
    fixed = bandwidths.fixed(module, phase) if isinstance(bandwidths, HasFixedTime) else 0.0
    share = bandwidths.bandwidth(module, phase, degree, quota)
    return Demand(module=module, quota=quota, share=share, fixed=fixed)


class Taker(NamedTuple):
    """A demand under one device's coefficients."""

    share: float
    """Share of the bandwidth over its whole time alone."""
    idle: float
    """Part of that time in which it draws nothing."""
    ask: float
    """Rate alone outside of that part."""
    cap: float
    """Rate that its slots can draw; not below ``ask``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leveling:
    """Coefficients of our form; see the module's docstring.

    More neighbours, or one that uses more, never help, and a module alone loses nothing, whatever the coefficients.
    """

    draw: float
    """Share of the bandwidth that one slot of a module can draw, where ``draws`` does not have it."""
    capacity: float = 1.0
    """Bandwidth that modules get together, as a share of what B is measured in."""
    fairness: float = 0.5
    """0: all are cut in proportion to what they ask; 1: down to one level of what their slots could draw."""
    cache: float = 0.0
    """Growth of traffic for each unit of the neighbours' B."""
    idle: float = 1.0
    """Part of the fixed time that really draws nothing and is not slowed down."""
    draws: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """``draw`` of modules that were measured beside others, by name."""

    def __post_init__(self) -> None:
        positive = (self.capacity, self.draw, *self.draws.values())
        if not (
            all(0 < value < math.inf for value in positive)
            and 0 <= self.fairness <= 1
            and 0 <= self.idle <= 1
            and 0 <= self.cache < math.inf
        ):
            raise ValueError(
                f"{self}: capacity and draws are above 0, fairness and idle from 0 to 1, cache not negative, all finite"
            )

    def taker(self, demand: Demand) -> Taker:
        """Returns what a demand comes to."""
        idle = min(MAX_IDLE, self.idle * demand.fixed * demand.share)
        ask = demand.share / (1 - idle)
        drawn = self.draws.get(demand.module, self.draw)
        return Taker(demand.share, idle, ask, max(ask, min(1.0, drawn * demand.quota)))

    def extra_share(self, own: Taker, others: Sequence[Taker]) -> float:
        """Returns the extra share of the time alone that neighbours cost."""
        if not others or own.share <= MIN_SHARE:
            return 0.0
        total = own.share + math.fsum(other.share for other in others)
        drawing = [_Drawing.of(one, total, self) for one in (own, *others) if one.share > MIN_SHARE]
        slowdown = drawing[0].slowdown(self._level(drawing), self.fairness)
        return max(0.0, slowdown / max(1.0, own.share / self.capacity) - 1)

    def _level(self, drawing: Sequence[_Drawing]) -> float:
        """The level at which all together draw the capacity; 1 where they draw less.

        What is drawn is concave in the level, so Newton's steps from below never pass the root.
        """
        if math.fsum(one.traffic / one.slowdown(1.0, self.fairness) for one in drawing) <= self.capacity:
            return 1.0
        level = self.capacity / math.fsum(
            (1 - self.fairness) * one.most + self.fairness * one.taker.cap for one in drawing
        )
        for _ in range(_STEPS):
            drawn = slope = 0.0
            for one in drawing:
                rate, steepness = one.rate(level, self.fairness)
                slowdown = one.slowdown(level, self.fairness)
                drawn += one.traffic / slowdown
                if one.wanted > rate:
                    slope += (one.traffic / slowdown) ** 2 / rate**2 * steepness
            if slope <= 0 or self.capacity - drawn <= _CLOSE * slope * level:
                break
            level = min(1.0, level + (self.capacity - drawn) / slope)
        return level


class _Drawing(NamedTuple):
    """A taker beside others, whose traffic has grown."""

    taker: Taker
    traffic: float
    """Traffic over the time alone."""
    wanted: float
    """Rate at which the grown traffic takes no longer."""
    most: float
    """That, as far as its slots can draw it."""

    @classmethod
    def of(cls, taker: Taker, total: float, coefficients: Leveling) -> _Drawing:
        growth = 1 + coefficients.cache * max(0.0, total - taker.share)
        wanted = taker.ask * growth
        return cls(taker, taker.share * growth, wanted, min(wanted, taker.cap))

    def rate(self, level: float, fairness: float) -> tuple[float, float]:
        """Returns what it gets at a level, and how steeply that rises."""
        fair = level * self.taker.cap
        if fair < self.most:
            return (1 - fairness) * level * self.most + fairness * fair, (
                1 - fairness
            ) * self.most + fairness * self.taker.cap
        return (1 - fairness) * level * self.most + fairness * self.most, (1 - fairness) * self.most

    def slowdown(self, level: float, fairness: float) -> float:
        """Returns its time over that alone."""
        rate, _ = self.rate(level, fairness)
        return self.taker.idle + (1 - self.taker.idle) * max(1.0, self.wanted / rate)


class LeveledBandwidth:
    """Our form: what a module loses when bandwidth runs out (see ``Leveling``), as a share of its time alone."""

    is_pairwise = False

    def __init__(self, coefficients: Mapping[Phase, Leveling], bandwidths: HasBandwidth) -> None:
        """Takes coefficients of each phase (a phase without is undisturbed) and what modules use alone."""
        self.coefficients = dict(coefficients)
        self._bandwidths = bandwidths
        self._known: dict[tuple[str, Phase, int], Taker] = {}

    @property
    def is_zero(self) -> bool:
        """Whether no phase has coefficients; with them, enough neighbours always cost something."""
        return not self.coefficients

    def taker(self, module: str, phase: Phase, quota: int) -> Taker:
        """Returns what a module asks of the bandwidth; remembered, a search asks for the same few again and again."""
        key = (module, phase, quota)
        if key not in self._known:
            demand = demand_of(self._bandwidths, module, phase, 1, quota)
            self._known[key] = self.coefficients[phase].taker(demand)
        return self._known[key]

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the extra share of ``alone_ms``, in milliseconds."""
        coefficients = self.coefficients.get(phase)
        if not beside or coefficients is None:
            return 0.0
        others = [self.taker(name, phase, other) for name, other in beside]
        return alone_ms * coefficients.extra_share(self.taker(module, phase, quota), others)
