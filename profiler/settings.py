"""Settings of a profiling run: quotas, time, repetitions, and tolerance of noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mosaic.device import Device
from mosaic.profile import COMPARABLE_SHARE

QuotaChoice = Literal["tenths", "all"]
"""The slots nearest to tenths of the device, or every slot."""


def default_quotas(device: Device) -> tuple[int, ...]:
    """Returns the slots nearest to tenths of a device (paper section 3.3); up to ten slots, all."""
    return tuple(sorted({max(1, round(tenth * device.num_slots / 10)) for tenth in range(1, 11)}))


def choose_quotas(choice: Iterable[int] | QuotaChoice, device: Device) -> tuple[int, ...]:
    """Returns the quotas of a choice in slots, increasing; raises InvalidPlanError for a quota outside the device."""
    if choice == "tenths":
        return default_quotas(device)
    if choice == "all":
        return tuple(range(1, device.num_slots + 1))
    quotas = () if isinstance(choice, str) else tuple(sorted(set(choice)))
    if not quotas:
        raise ValueError(f"quotas={choice!r}; use tenths, all, or numbers of slots")
    for quota in quotas:
        device.check_quota(quota, of="profiling")
    return quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Settings of a profiling run; raises ValueError if one is out of range."""

    warmup: int = 2
    """Warm-up repetitions."""
    min_repeats: int = 5
    max_repeats: int = 40
    """Repetitions of a sample."""
    spread: float = 0.05
    """Repeats until the quartiles are within this share of the median."""
    sample_seconds: float = 1.0
    """Maximum time of a sample."""
    foreign_share: float = COMPARABLE_SHARE
    """Share of the CPU time by other processes above which a sample on the host is repeated."""
    retry_seconds: float = 20.0
    """Time for repetitions over the whole run; then the least disturbed try counts."""
    strict: bool = False
    """Raises an error above ``foreign_share``, which otherwise marks the profile. On a GPU always marks it."""
    pairs: bool = True
    """Measures pairs of modules side by side."""
    max_seconds: float | None = None
    """Time for all measurements; ``Profile.left_out`` lists what is missing. The largest and the smallest quota of each
    module are always measured, because nothing is extrapolated."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 1 <= self.min_repeats <= self.max_repeats:
            raise ValueError(
                f"warmup={self.warmup}, min_repeats={self.min_repeats}, max_repeats={self.max_repeats}; use a warm-up "
                "of 0 or more and 1 <= min_repeats <= max_repeats"
            )
        if not (self.spread > 0 and self.sample_seconds > 0 and self.foreign_share > 0 and self.retry_seconds >= 0):
            raise ValueError("use positive spread, sample_seconds and foreign_share, and retry_seconds of 0 or more")
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise ValueError(f"max_seconds={self.max_seconds}; use 0 or more, or None for no deadline")
