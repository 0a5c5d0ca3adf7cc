"""The result of partitioning: chunks of layers on ranks, and sizes of sub-microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mosaic.graph import Part
from mosaic.pipelining.workload.layers import PipelineModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Layers that run on one rank one after the other, as one task of each phase.

    Raises:
        ValueError: It has no layers, two parts of one module, or an invalid share.
    """

    parts: tuple[Part, ...]
    """Of one module, or of several if modules are mixed."""
    rank: int
    lane: int = 0
    """Index of its lane; lanes of a rank run at the same time, each on its quota."""
    share: float = 1.0
    """The lane's share of the rank's SMs."""
    segment: int = 0
    """Index of its segment among those of its module: a segment passes over all ranks once (PipeWeaver, section 5)."""

    def __post_init__(self) -> None:
        names = [part.module for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a chunk of {names}; give it one part or more, each of another module")
        if self.rank < 0 or self.lane < 0 or self.segment < 0:
            raise ValueError(
                f"chunk {self}: rank={self.rank}, lane={self.lane}, segment={self.segment}; they count from 0"
            )
        if not 0 < self.share <= 1:  # also catches NaN
            raise ValueError(f"chunk {self}: share={self.share}; a lane has more than 0 of its rank and at most 1")

    @property
    def row(self) -> tuple[int, int]:
        """Its rank and lane, which run one task at a time."""
        return self.rank, self.lane

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Chunks of all modules.

    Raises:
        ValueError: A layer is in no chunk or in two, or comes before an earlier one; a rank is out of range; lanes have
            more than their rank, or one lane two shares; a module that is mixed with others is cut into pieces.
    """

    num_ranks: int
    """Pipeline ranks."""
    chunks: tuple[Chunk, ...]
    """In the order of the dataflow."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Most units of a sub-microbatch, by module; by default whole microbatches."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks={self.num_ranks}; a pipeline has at least one rank")
        self._check_layers()
        self._check_lanes()
        for name, size in self.sizes.items():
            if name not in self.modules:
                raise ValueError(f"sizes has {name!r}, which is in no chunk; the modules are {', '.join(self.modules)}")
            if size < 1:
                raise ValueError(f"sizes[{name!r}]={size}; a sub-microbatch has at least one unit")
            mixed = next((c for c in self.chunks if len(c.parts) > 1 and name in {p.module for p in c.parts}), None)
            if mixed is not None:
                raise ValueError(
                    f"{name!r} is cut into pieces of {size} and shares the chunk {mixed} with others, whose pieces are "
                    "not its own; leave its size out, or give it chunks of its own"
                )

    def _check_layers(self) -> None:
        ends: dict[str, tuple[int, int]] = {}
        for chunk in self.chunks:
            for part in chunk.parts:
                end, total = ends.get(part.module, (0, part.total))
                if part.first != end or part.total != total:
                    raise ValueError(
                        f"{part} follows layer {end} of {total} of {part.module!r}; put each of its layers into one "
                        "chunk, in their order"
                    )
                ends[part.module] = part.end, total
        for module, (end, total) in ends.items():
            if end < total:
                raise ValueError(f"layers {end} to {total} of {module!r} are in no chunk; put them into one")
        if not ends:
            raise ValueError("a partition needs at least one chunk; none was given")

    def _check_lanes(self) -> None:
        shares: dict[tuple[int, int], float] = {}
        for chunk in self.chunks:
            if chunk.rank >= self.num_ranks:
                raise ValueError(f"chunk {chunk} is on rank {chunk.rank}; there are {self.num_ranks}, from 0")
            if shares.setdefault(chunk.row, chunk.share) != chunk.share:
                raise ValueError(
                    f"chunk {chunk}: lane {chunk.lane} of rank {chunk.rank} has the shares {shares[chunk.row]} and "
                    f"{chunk.share}; give a lane one"
                )
        for rank in range(self.num_ranks):
            total = math.fsum(share for (own, _), share in shares.items() if own == rank)
            if total > 1 + 1e-9 and sum(own == rank for own, _ in shares) > 1:
                raise ValueError(f"the lanes of rank {rank} have {total:.3g} of it; give them at most 1 together")

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules, in the order of their first chunks."""
        return tuple(dict.fromkeys(part.module for chunk in self.chunks for part in chunk.parts))

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Ranks and lanes with chunks, in order: the rows of a task graph. A rank without a chunk has one row."""
        used = {chunk.row for chunk in self.chunks}
        idle = {(rank, 0) for rank in range(self.num_ranks)} - {(rank, 0) for rank, _ in used}
        return tuple(sorted(used | idle))

    def check_covers(self, model: PipelineModel) -> None:
        """Checks that it is a partition of a model.

        Raises:
            ValueError: A module is missing or unknown, its number of layers differs, or a chunk comes before one whose
                output it needs.
        """
        layers = {module.name: len(module.trains) for module in model.modules}
        if strange := sorted(set(layers) ^ set(self.modules)):
            raise ValueError(
                f"the model has the modules {', '.join(layers)}, the partition {', '.join(self.modules)}; they differ "
                f"by {', '.join(strange)}: make the partition again"
            )
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, chunk in enumerate(self.chunks):
            for part in chunk.parts:
                if part.total != layers[part.module]:
                    raise ValueError(
                        f"{part} is of {part.total} layers; the model's {part.module!r} has {layers[part.module]}: "
                        "make the partition again"
                    )
                first.setdefault(part.module, index)
                last[part.module] = index
        for feed in model.feeds:
            if last[feed.source] > first[feed.target]:
                raise ValueError(
                    f"{feed.target!r} begins in chunk {first[feed.target]}, before {feed.source!r}, which feeds it, "
                    f"ends in chunk {last[feed.source]}; put chunks in the order in which data pass through them"
                )
            shared = last[feed.source] == first[feed.target]
            names = [part.module for part in self.chunks[first[feed.target]].parts]
            if shared and names.index(feed.source) > names.index(feed.target):
                raise ValueError(
                    f"chunk {first[feed.target]} runs {feed.target!r} before {feed.source!r}, which feeds it"
                )


def parts_of(module: str, ends: Sequence[int]) -> tuple[Part, ...]:
    """Returns the parts of a module that end at these layers; the last end is its number of layers."""
    starts = (0, *ends[:-1])
    return tuple(
        Part(module=module, first=first, count=end - first, total=ends[-1])
        for first, end in zip(starts, ends, strict=True)
    )
