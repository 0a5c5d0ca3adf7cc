"""A device for planners: slots, SMs per slot, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mosaic.artifact import Ge, StrictFile
from mosaic.errors import InvalidPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(StrictFile):
    """One GPU, or the set of CPU cores of the host backend.

    A *slot* is the smallest group of SMs that can be assigned: 8 SMs on Hopper, one core on the host.
    """

    name: str
    kind: Literal["host", "cuda"]
    num_slots: Annotated[int, Ge(1)]
    sms_per_slot: Annotated[int, Ge(1)] = 1
    remainder_sms: Annotated[int, Ge(0)] = 0
    """SMs outside every slot (4 of 132 on an H100)."""
    memory_bytes: Annotated[int, Ge(0)] = 0
    """Memory in bytes; 0 if unknown."""

    def __str__(self) -> str:
        return f"{self.name} with {self.num_slots} slots"

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(range(self.num_slots))

    def check_quota(self, quota: int, *, of: str) -> None:
        """Raises InvalidPlanError unless ``quota`` is between 1 and the number of slots."""
        if not 1 <= quota <= self.num_slots:
            raise InvalidPlanError(
                f"{of} asks for a quota of {quota} slots; {self.name} has {self.num_slots}: use 1 to {self.num_slots}"
            )
