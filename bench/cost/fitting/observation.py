"""Modules that ran side by side: what each lost, with the bandwidths that explain it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from bench.cost.fitting.group import GroupSample
from bench.cost.fitting.least_squares import Matrix
from mosaic.cost.interference.leveling import Demand, demand_of
from mosaic.cost.interference.protocol import HasBandwidth
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One member of one group."""

    group: int
    """Which group; what is left out together when predictions are judged."""
    phase: Phase
    """Forward or backward."""
    demand: Demand
    """What it asks of the bandwidth."""
    beside: tuple[Demand, ...]
    """What its neighbours ask."""
    alone_ms: float
    """Median time alone, in milliseconds."""
    extra_ms: float
    """Median time beside the others less that; negative where noise made it faster."""

    @property
    def own(self) -> float:
        """Share of the bandwidth that it uses alone, 0 to 1."""
        return self.demand.share

    @property
    def others(self) -> tuple[float, ...]:
        """Shares of its neighbours."""
        return tuple(one.share for one in self.beside)


@dataclass(frozen=True, slots=True)
class ObservationTable:
    """Observations as columns; made once, cut into parts by ``where``."""

    seen: NDArray[np.object_]
    """The observations."""
    group: NDArray[np.int64]
    """See ``Observation``."""
    size: NDArray[np.int64]
    """Modules of the group."""
    own: Matrix
    """See ``Observation``."""
    pressure: Matrix
    """Sum of the neighbours' shares."""
    product: Matrix
    """Product of all shares, its own too."""
    alone_ms: Matrix
    """See ``Observation``."""
    extra_ms: Matrix
    """See ``Observation``."""

    @classmethod
    def of(cls, seen: Sequence[Observation]) -> ObservationTable:
        """Puts observations into columns."""
        rows = np.empty(len(seen), dtype=object)
        rows[:] = seen
        return cls(
            rows,
            np.array([o.group for o in seen], dtype=np.int64),
            np.array([1 + len(o.others) for o in seen], dtype=np.int64),
            np.array([o.own for o in seen]),
            np.array([math.fsum(o.others) for o in seen]),
            np.array([o.own * math.prod(o.others) for o in seen]),
            np.array([o.alone_ms for o in seen]),
            np.array([o.extra_ms for o in seen]),
        )

    def __len__(self) -> int:
        return len(self.own)

    @property
    def groups(self) -> list[int]:
        """Groups that it holds members of, rising."""
        found: list[int] = np.unique(self.group).tolist()
        return found

    def where(self, chosen: NDArray[np.bool_]) -> ObservationTable:
        """Returns the chosen observations."""
        return ObservationTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def columns(self, names: Sequence[str]) -> Matrix:
        """Returns what the coefficients of these names are multiplied with (see ``Eq8`` and ``Sharing``)."""
        known = {
            "e1": np.ones(len(self)),
            "e2": self.own + self.pressure,
            "e3": self.product,
            "pressure": self.pressure,
            "product": self.own * self.pressure,
        }
        return np.column_stack([known[name] for name in names])

    def errors(self, extra_ms: Matrix) -> Matrix:
        """Returns relative errors of the times beside the others when ``extra_ms`` is predicted."""
        found: Matrix = np.abs(extra_ms - self.extra_ms) / (self.alone_ms + self.extra_ms)
        return found


def observe(groups: Iterable[GroupSample], bandwidths: HasBandwidth) -> tuple[Observation, ...]:
    """Puts measured groups beside the bandwidths of their members.

    Members that take no time, alone or together, say nothing about shares of it and are left out.

    Raises:
        InvalidProfileError: The bandwidth of a member is not known.
        ValueError: It is not known at its quota.
    """
    found: list[Observation] = []
    for number, group in enumerate(groups):
        asked = [demand_of(bandwidths, member.module, member.phase, 1, member.quota) for member in group.members]
        for index, member in enumerate(group.members):
            alone, together = statistics.median(member.alone_ms), statistics.median(member.times_ms)
            one = Observation(
                group=number,
                phase=member.phase,
                demand=asked[index],
                beside=(*asked[:index], *asked[index + 1 :]),
                alone_ms=alone,
                extra_ms=together - alone,
            )
            found.append(one)
    return tuple(one for one in found if one.alone_ms > 0 and one.alone_ms + one.extra_ms > 0)
