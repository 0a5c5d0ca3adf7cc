"""Where one part of a model runs, and what is meant to run beside it: grids of ranks, placements, stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from mosaic.artifact import Ge
from mosaic.device import FORBID_EXTRA
from mosaic.errors import InvalidPlanError
from mosaic.graph import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks as an array with the axes ``data``, ``context`` and ``tensor``, of which the last changes fastest.

    Raises:
        InvalidPlanError: The ranks do not fill the array.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    ranks: tuple[int, ...] = (0,)
    """In the array's order; rank i is on device i."""
    context: Annotated[int, Ge(1)] = 1
    """Ranks that share each sample's sequence."""
    tensor: Annotated[int, Ge(1)] = 1
    """Ranks that share each layer."""

    def __post_init__(self) -> None:
        if self.context * self.tensor > 1 and len(self.ranks) % (self.context * self.tensor):
            raise InvalidPlanError(
                f"{len(self.ranks)} ranks do not fill a grid of context={self.context} and tensor={self.tensor}; "
                f"give a multiple of {self.context * self.tensor}"
            )

    @property
    def data(self) -> int:
        """Ranks along ``data``, which share the batch: the data-parallel degree."""
        return len(self.ranks) // (self.context * self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One part's place: its ranks, its slots on each of their devices, and the times predicted there."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    part: Part
    """What runs there."""
    slots: tuple[int, ...]
    """Slot indices, rising; their number is the quota. On the first of its devices, where they differ."""
    grid: Grid = Grid()
    """Its ranks."""
    slots_by_device: tuple[tuple[int, ...], ...] = ()
    """Slot indices on each of ``devices`` where these differ between them; empty where all have ``slots``."""
    forward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted forward time beside its stage's other modules, in milliseconds."""
    backward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted backward time beside its stage's other modules, in milliseconds."""
    route_forward_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``forward_ms`` in which rows travel between ranks."""
    route_backward_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``backward_ms`` in which their gradients do."""
    reduce_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``backward_ms`` in which its parameters' gradients are summed and nothing else is done."""

    @property
    def module(self) -> str:
        """Name of its module in the graph."""
        return self.part.module

    @property
    def devices(self) -> tuple[int, ...]:
        """Device indices, one for each of its ranks, in the grid's order."""
        return self.grid.ranks

    @property
    def quota(self) -> int:
        """Number of slots on each device."""
        return len(self.slots)

    @property
    def degree(self) -> int:
        """Data-parallel degree."""
        return self.grid.data

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Each device and slot that it holds."""
        everywhere = self.slots_by_device or (self.slots,) * len(self.devices)
        return tuple((device, slot) for device, slots in zip(self.devices, everywhere, strict=True) for slot in slots)

    def slots_on(self, device: int) -> tuple[int, ...]:
        """Returns its slots on one of its devices; raises ValueError for another."""
        place = self.devices.index(device)
        return self.slots_by_device[place] if self.slots_by_device else self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Parts meant to run at the same time, on disjoint partitions wherever they share a device."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    placements: tuple[Placement, ...]
    """The stage's parts."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules in this stage."""
        return tuple(placement.module for placement in self.placements)

    @property
    def forward_ms(self) -> float:
        """Predicted time of its slowest forward, in milliseconds."""
        return max((p.forward_ms for p in self.placements), default=0.0)

    @property
    def backward_ms(self) -> float:
        """Predicted time of its slowest backward, in milliseconds."""
        return max((p.backward_ms for p in self.placements), default=0.0)
