"""Chunks of layers on ranks, the request for them, and the times of layers that they balance.

A layer computes gradients for its weights if they train, and for its inputs if anything before it trains: earlier
layers of its module, or of a module whose data reach it (Cornstarch, section 4.2). Without gradients it has no
backward, and recomputes nothing. This depends on the microbatch: a frozen backbone behind a trained projector has no
backward with text alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import or_

from mosaic.graph import Part
from mosaic.pipelining.layers import Layer, Microbatch, PipelineModel, Strategy


def sources_of(model: PipelineModel, present: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the modules of ``present`` that feed each of them, directly or through skipped ones."""
    through: dict[str, tuple[str, ...]] = {}
    for module in model.modules:
        sources: dict[str, None] = {}
        for feed in model.feeds:
            if feed.target == module.name:
                sources |= dict.fromkeys((feed.source,) if feed.source in present else through[feed.source])
        through[module.name] = tuple(sources)
    return {name: through[name] for name in through if name in present}


InputGradients = Mapping[str, tuple[bool, ...]]
"""By module, True for each layer that computes gradients for its inputs."""


def input_gradients(model: PipelineModel, present: Collection[str]) -> InputGradients:
    """Returns the layers that compute gradients for their inputs in a microbatch of the modules ``present``."""
    sources = sources_of(model, present)
    gradients: dict[str, tuple[bool, ...]] = {}
    trains_behind: dict[str, bool] = {}
    for module in model.modules:
        if module.name in present:
            trains_before = any(trains_behind[source] for source in sources[module.name])
            *inputs, trains_behind[module.name] = accumulate(module.trains, or_, initial=trains_before)
            gradients[module.name] = tuple(inputs)
    return gradients


def strategy_of(layer: Layer, name: str) -> Strategy:
    """Returns a layer's strategy of that name, or its first, which keeps."""
    return next((strategy for strategy in layer.strategies if strategy.name == name), layer.strategies[0])


def layer_ms(layer: Layer, strategy: Strategy, *, inputs: bool, weights: bool) -> tuple[float, float, float]:
    """Returns the times of forward and of backward for inputs, with the strategy, and of backward for weights."""
    if not inputs and not weights:
        return layer.forward_ms, 0.0, 0.0
    return (
        layer.forward_ms + strategy.extra_forward_ms,
        (layer.backward_ms if inputs else 0.0) + strategy.extra_backward_ms,
        layer.weights_ms if weights else 0.0,
    )


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

    def __post_init__(self) -> None:
        names = [part.module for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a chunk of {names}; give it one part or more, each of another module")
        if self.rank < 0 or self.lane < 0:
            raise ValueError(f"chunk {self}: rank={self.rank}, lane={self.lane}; they count from 0")
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
        ValueError: Layers are not each in one chunk, in order; a rank, a lane's share or a size does not fit.
    """

    num_ranks: int
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
        return tuple(dict.fromkeys(part.module for chunk in self.chunks for part in chunk.parts))

    def modules_on(self, rank: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.module for chunk in self.chunks if chunk.rank == rank for part in chunk.parts))

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Ranks and lanes with chunks, in order: the rows of a task graph. A rank without a chunk has one row."""
        used = {chunk.row for chunk in self.chunks}
        idle = {(rank, 0) for rank in range(self.num_ranks)} - {(rank, 0) for rank, _ in used}
        return tuple(sorted(used | idle))

    def check_covers(self, model: PipelineModel) -> None:
        """Checks that it is a partition of a model.

        Raises:
            ValueError: Its modules or their layers differ, or a chunk comes before one whose output it needs.
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


MIN_EFFICIENCY = 0.95
"""Share of the best throughput that a size of pieces must reach."""


def even_pieces(units: int, size: int) -> tuple[int, ...]:
    """Returns the units of the fewest pieces of at most ``size``, equal up to one unit."""
    count = -(-units // size)
    return tuple(units // count + (index < units % count) for index in range(count)) if count else ()


def efficient_sizes(model: PipelineModel, microbatches: Sequence[Microbatch]) -> Mapping[str, int]:
    """Returns the smallest efficient size of a piece for each module with several units in a microbatch.

    It has 95 % of the best throughput of any size in the module's largest microbatch. The time covers all phases of all
    layers, frozen or not; the paper measures it, here it comes from the layers.
    """
    sizes: dict[str, int] = {}
    for module in model.modules:
        largest = max(microbatches, key=module.units)
        rates = []
        for size in range(1, module.units(largest) + 1):
            layers = module.layers(largest, size)
            time_ms = math.fsum(layer.forward_ms + layer.backward_ms + layer.weights_ms for layer in layers)
            rates.append(size / time_ms if time_ms > 0 else math.inf)
        if len(rates) > 1:
            sizes[module.name] = next(
                (size for size, rate in enumerate(rates, 1) if rate >= MIN_EFFICIENCY * max(rates)), 1
            )
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model, its ranks, and representative microbatches.

    Raises:
        ValueError: A number of ranks, chunks, slots or microbatches is 0, or no microbatch reaches a module.
    """

    model: PipelineModel
    num_ranks: int
    microbatches: Sequence[Microbatch]
    """Representative ones; times are their means."""
    chunks_per_rank: int = 1
    """Chunks of each rank, for mixed partitions."""
    slots_per_rank: int = 1
    """Slots of each rank's device, for its lanes."""

    def __post_init__(self) -> None:
        if min(self.num_ranks, self.chunks_per_rank, self.slots_per_rank) < 1:
            raise ValueError(
                f"num_ranks={self.num_ranks}, chunks_per_rank={self.chunks_per_rank}, "
                f"slots_per_rank={self.slots_per_rank}; a pipeline has at least one each"
            )
        if not self.microbatches:
            raise ValueError("no microbatches were given; a partition is made for at least one")
        if not any(module.units(each) for module in self.model.modules for each in self.microbatches):
            raise ValueError("no microbatch passes through any module; give microbatches with some modality")


def layer_times(request: Request, *, sizes: Mapping[str, int] | None = None) -> Mapping[str, tuple[float, ...]]:
    """Returns the mean times of each module's layers over all pieces, in milliseconds for all phases.

    Without ``sizes``, pieces are whole microbatches, and those that skip the module count as 0.
    """
    sums = {module.name: [0.0] * len(module.trains) for module in request.model.modules}
    counts = dict.fromkeys(sums, 0)
    for microbatch in request.microbatches:
        present = {module.name for module in request.model.modules if module.units(microbatch)}
        gradients = input_gradients(request.model, present)
        for module in request.model.modules:
            units = module.units(microbatch)
            pieces = even_pieces(units, (sizes or {}).get(module.name, max(units, 1)))
            counts[module.name] += max(len(pieces), sizes is None)
            for piece in pieces:
                layers = module.layers(microbatch, piece)
                if len(layers) != len(module.trains):
                    raise ValueError(f"{module.name!r} has {len(layers)} layers, and trains has {len(module.trains)}")
                flags = zip(layers, gradients[module.name], module.trains, strict=True)
                for index, (layer, inputs, weights) in enumerate(flags):
                    times = layer_ms(layer, layer.strategies[0], inputs=inputs, weights=weights)
                    sums[module.name][index] += math.fsum(times)
    return {name: tuple(total / max(counts[name], 1) for total in sums[name]) for name in sums}


def backbone_of(model: PipelineModel) -> str:
    """Returns the module that all others feed or read; an encoder, as a source, does not count.

    Of several, such as a projector, the backbone and a decoder in a row, it has the most parameters.
    """
    sources = sources_of(model, {module.name for module in model.modules})
    before: dict[str, set[str]] = {}
    for name, feeding in sources.items():
        before[name] = set(feeding).union(*(before[source] for source in feeding))
    sizes = {module.name: module.num_parameters(0, len(module.trains)) for module in model.modules}
    joints = [
        name
        for name in sources
        if before[name] and all(other in before[name] or name in before[other] for other in sources if other != name)
    ]
    return max(reversed(joints or tuple(sources)), key=lambda name: sizes[name])
