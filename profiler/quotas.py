"""Which degrees and quotas to measure: fixed ones, or wherever a measurement tells most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mosaic.cost.surfaces.sampling import next_of_both, next_shaped_sample
from mosaic.device import Device
from mosaic.profile import Sample
from mosaic.shape import ModuleShape

QuotaChoice = Literal["tenths", "all", "adaptive"]
"""The slots nearest to tenths of the device, every slot, or wherever the surface bends."""

_MOST_CANDIDATES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Degrees, and quotas at each of them."""

    quotas: tuple[int, ...]
    """Slots, rising; where adaptive, those that may be chosen."""
    degrees: tuple[int, ...] = (1,)
    """Data-parallel degrees, rising."""
    bound: float | None = None
    """Relative error at which adaptive sampling stops; None measures every quota."""

    @classmethod
    def choose(
        cls, quotas: Iterable[int] | QuotaChoice, degrees: Iterable[int], device: Device, *, bound: float
    ) -> Sampling:
        """Puts a choice into numbers.

        Raises:
            InvalidPlanError: A quota is below one slot or above the device.
            ValueError: There is no such choice, or degrees are not 1 and powers of two.
        """
        everywhere = tuple(range(1, device.num_slots + 1))
        is_adaptive = quotas == "adaptive"
        if is_adaptive:
            step = -(-device.num_slots // _MOST_CANDIDATES)
            chosen = tuple(sorted({1, *everywhere[step - 1 :: step], device.num_slots}))
        elif quotas == "tenths":
            chosen = default_quotas(device)
        elif quotas == "all":
            chosen = everywhere
        elif isinstance(quotas, str):
            raise ValueError(f"quotas={quotas!r}; use tenths, all, adaptive, or numbers of slots")
        else:
            chosen = tuple(sorted(set(quotas)))
        for quota in chosen:
            device.check_quota(quota, of="profiling")
        wanted = tuple(sorted({1, *degrees}))
        if not chosen or any(degree < 1 or degree & (degree - 1) for degree in wanted):
            raise ValueError(f"quotas {chosen}, degrees {wanted}; use one quota or more, and degrees 1, 2, 4, 8, ...")
        return cls(quotas=chosen, degrees=wanted, bound=bound if is_adaptive else None)

    @property
    def is_adaptive(self) -> bool:
        """Whether quotas are chosen by what was measured."""
        return self.bound is not None

    @property
    def ends(self) -> tuple[int, ...]:
        """Quotas at which a degree that is not possible is noted."""
        return tuple(sorted({self.quotas[0], self.quotas[-1]})) if self.is_adaptive else self.quotas

    def remaining(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        """Returns quotas without samples: the ends, outside of which nothing is predicted, then from large to small."""
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
        """About how many points a module takes."""
        return len(self.degrees) * (min(5, len(self.quotas)) if self.is_adaptive else len(self.quotas))

    def next_quota(
        self, samples: Sequence[Sample], shape: ModuleShape | None = None, known: Sequence[Sample] = ()
    ) -> int | None:
        """Returns where to measure next, given both phases of one module and degree so far; None where done.

        Args:
            samples: So far.
            shape: What counted operators say of the module, if anything; adaptive sampling goes by it.
            known: Samples of the module at other degrees.
        """
        if self.bound is None:
            return next(iter(self.remaining(samples)), None)
        if shape is not None and samples and any(curve.degree == samples[0].degree for curve in shape.curves):
            return next_shaped_sample(samples, self.quotas, shape, bound=self.bound, known=known)
        return next_of_both(samples, self.quotas, bound=self.bound)


def default_quotas(device: Device) -> tuple[int, ...]:
    """Returns the slots nearest to tenths of a device, paper section 3.3; all of them up to ten slots."""
    count = device.num_slots
    return tuple(sorted({max(1, round(tenth * count / 10)) for tenth in range(1, 11)}))
