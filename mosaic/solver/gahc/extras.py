"""Costs of single neighbours in nanoseconds, and the options that they make redundant.

Exact: dropping and joining options does not change the feasibility of a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mosaic.cost import Cost
from mosaic.profile import Phase
from mosaic.solver.options import NS_PER_MS, DeploymentOption


class PairwiseExtras:
    """Extra time of every option of every module beside every neighbour, computed lazily."""

    def __init__(self, options: Mapping[str, Sequence[DeploymentOption]], cost: Cost) -> None:
        self._options = options
        self._cost = cost
        self._quotas = {name: sorted({option.quota for option in options[name]}) for name in options}
        # a decorator on the method would keep every object alive
        self.ns = cache(self._ns)
        self._worst_ns = cache(self._worst_of_pair)
        self._disturbances = cache(self._disturbances_of)

    def _ns(self, name: str, option: DeploymentOption, beside: str, quota: int) -> int:
        """Forward and backward together (Eq. 7's delta)."""
        own = option.degree, option.quota
        return round(
            sum(self._cost.interference_ms(name, phase, *own, beside=[(beside, quota)]) for phase in Phase) * NS_PER_MS
        )

    def worst_ns(self, name: str, option: DeploymentOption, others: Sequence[str]) -> int:
        """Returns an option's extra time with all of ``others`` on its devices at their worst quotas."""
        return sum(self._worst_ns(name, option, other) for other in others if other != name)

    def _worst_of_pair(self, name: str, option: DeploymentOption, beside: str) -> int:
        return max(self.ns(name, option, beside, quota) for quota in self._quotas[beside])

    def as_neighbour(self, name: str, quota: int) -> int:
        """Returns the least quota at which ``name`` disturbs all others as it does at ``quota``."""
        added_ns = self._disturbances(name)[quota]
        return next(other for other in self._quotas[name] if np.array_equal(self._disturbances(name)[other], added_ns))

    def is_gentler(self, name: str, quota: int, than: int) -> bool:
        """Returns True if ``name`` disturbs no other module more at ``quota`` than at ``than``."""
        added_ns = self._disturbances(name)
        return bool(np.all(added_ns[quota] <= added_ns[than]))

    def _disturbances_of(self, name: str) -> dict[int, NDArray[np.int64]]:
        affected = [(other, option) for other in self._options if other != name for option in self._options[other]]
        return {
            quota: np.array([self.ns(other, option, name, quota) for other, option in affected], dtype=np.int64)
            for quota in self._quotas[name]
        }

    def candidates(self, name: str, target_ns: int, stage: Sequence[str]) -> tuple[DeploymentOption, ...]:
        """Returns the options with which a module of a stage can meet a target.

        An option is dropped if another meets the target beside any neighbours, needs no more devices, slots or memory,
        and disturbs no module more.
        """
        undominated: list[DeploymentOption] = []
        safe: list[DeploymentOption] = []
        for option in sorted(o for o in self._options[name] if o.latency_ns <= target_ns):
            if any(
                s.quota <= option.quota
                and s.memory_bytes <= option.memory_bytes
                and self.is_gentler(name, s.quota, option.quota)
                for s in safe
            ):
                continue
            undominated.append(option)
            if option.latency_ns + self.worst_ns(name, option, stage) <= target_ns:
                safe.append(option)
        return tuple(undominated)
