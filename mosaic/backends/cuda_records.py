"""What is told of partitions: what they were granted, on which SMs they were seen, and what making them took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mosaic.backends.cuda.driver import Placement
from mosaic.device import FORBID_EXTRA

Slots = tuple[int, ...]
Layout = tuple[Slots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """What the driver made of one partition."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots: Slots
    """Its slots; empty for the SMs that the split left over."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """What adding one layout to the pool took; zeros where everything was there already."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    partitions: Layout
    """Its partitions."""
    num_contexts: int
    """Green contexts that were made."""
    num_streams: int
    """Streams that were made."""
    creation_ms: float
    """Time that it took."""
    driver_bytes: int
    """Device memory that went, by the driver; wrong by what others took or gave meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """Partitions in use, and what making them took."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    fine: bool
    """Whether slots are the driver's smallest ones, without large clusters."""
    placement: Placement
    """How partitions got their SMs."""
    partitions: tuple[PartitionRecord, ...]
    """In the order in which they were asked for."""
    remainder: PartitionRecord | None
    """The partition of left-over SMs, if it was asked for."""
    layouts: tuple[LayoutRecord, ...]
    """In the order in which they were added."""
    shared_sms: tuple[int, ...] = ()
    """Ids of the SMs that partitions without a common slot were seen to share, as some do beside CUDA's dynamic
    parallelism; more than can be put down to that are an error."""
    lane_overhead_bytes: int | None = None
    """Device memory that the first products on a lane leave behind; None where it was not measured."""

    @property
    def creation_ms(self) -> float:
        """Time that all layouts took."""
        return sum(layout.creation_ms for layout in self.layouts)

    @property
    def driver_bytes(self) -> int:
        """Device memory that all layouts took."""
        return sum(layout.driver_bytes for layout in self.layouts)
