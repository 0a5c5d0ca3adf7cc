"""Records of partitions: the SMs that they were granted, those that they were seen on, and what making them took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mosaic.device import FORBID_EXTRA

Slots = tuple[int, ...]
SlotLayout = tuple[Slots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """What the driver made of one partition."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots: Slots
    """Its slots."""
    requested_sms: int
    """SMs of its slots."""
    granted_sms: int
    """SMs that its green context has, read back from the driver."""
    sm_ids: tuple[int, ...] | None
    """Ids of the SMs that the probe saw it use, sorted; None where it was not probed."""
    creation_ms: float
    """Time that its context and stream took."""

    @classmethod
    def of(cls, info: Any) -> PartitionRecord:
        """Makes one of a pool's ``_C.PartitionInfo``."""
        return cls(
            slots=tuple(info.slots),
            requested_sms=info.requested_sms,
            granted_sms=info.granted_sms,
            sm_ids=None if info.sm_ids is None else tuple(info.sm_ids),
            creation_ms=info.creation_ms,
        )
