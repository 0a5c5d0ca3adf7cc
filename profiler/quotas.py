"""The ladder of degrees and quotas that a profile measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mosaic.device import Device
from mosaic.errors import unknown
from mosaic.profile import Sample

QuotaChoice = Literal["tenths", "all"]
"""The slots nearest to tenths of the device, or every slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Degrees, and quotas at each of them."""

    quotas: tuple[int, ...]
    """Slots, rising."""
    degrees: tuple[int, ...] = (1,)
    """Data-parallel degrees, rising."""

    @classmethod
    def choose(cls, quotas: Iterable[int] | QuotaChoice, degrees: Iterable[int], device: Device) -> Sampling:
        """Puts a choice into numbers.

        Raises:
            InvalidPlanError: A quota is below one slot or above the device.
            ValueError: There is no such choice, or a degree is below 1.
        """
        if quotas == "tenths":
            chosen = default_quotas(device)
        elif quotas == "all":
            chosen = tuple(range(1, device.num_slots + 1))
        elif isinstance(quotas, str):
            raise ValueError(f"{unknown('choice of quotas', quotas, ('tenths', 'all'))}, or numbers of slots")
        else:
            chosen = tuple(sorted(set(quotas)))
        for quota in chosen:
            device.check_quota(quota, of="profiling")
        wanted = tuple(sorted({1, *degrees}))
        if not chosen or wanted[0] < 1:
            raise ValueError(f"quotas {chosen}, degrees {wanted}; use one quota or more, and degrees from 1 on")
        return cls(quotas=chosen, degrees=wanted)

    def remaining(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        """Returns quotas without samples: both ends, since nothing is extrapolated, then from large to small."""
        *others, largest = self.quotas
        tried = {sample.quota for sample in samples}
        return tuple(quota for quota in (largest, *others[:1], *reversed(others[1:])) if quota not in tried)

    def is_enough(self, samples: Sequence[Sample]) -> bool:
        """Returns whether samples at degree 1 allow for a plan: both ends were tried, and two quotas ran."""
        tried = {sample.quota for sample in samples}
        ran = {sample.quota for sample in samples if sample.infeasible is None}
        return {self.quotas[0], self.quotas[-1]} <= tried and len(ran) > 1

    @property
    def expected(self) -> int:
        """Number of points that a module takes."""
        return len(self.degrees) * len(self.quotas)


def default_quotas(device: Device) -> tuple[int, ...]:
    """Returns the slots nearest to tenths of a device, paper section 3.3; all of them up to ten slots."""
    count = device.num_slots
    return tuple(sorted({max(1, round(tenth * count / 10)) for tenth in range(1, 11)}))
