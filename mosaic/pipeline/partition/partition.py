"""The result of partitioning: chunks of layers on ranks, and sizes of sub-microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mosaic.graph import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Layers that run on one rank one after the other, as one task of each phase."""

    parts: tuple[Part, ...]
    """Of one module, or of several where modules are mixed."""
    rank: int
    """Where."""
    lane: int = 0
    """Which of the rank's lanes; lanes run at the same time, each on its quota."""
    share: float = 1.0
    """Of the rank's SMs that the lane has."""
    segment: int = 0
    """Index of its segment among those of its module: a segment passes over all ranks once (PipeWeaver, section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Chunks of all modules.

    Raises:
        ValueError: A layer is in no chunk or in two, or a rank is out of range.
    """

    num_ranks: int
    """Pipeline ranks."""
    chunks: tuple[Chunk, ...]
    """In the order in which data pass through them."""
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """For a module the most units of a sub-microbatch; whole microbatches where left out."""
