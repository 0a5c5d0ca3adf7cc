"""One chunk of one kind of microbatch: its sites, the end of its call, its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.graph import Part
from mosaic.parts.split import ModelSplit, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """The common plan of all microbatches that call the same modules."""

    own: frozenset[int]
    """Sites that run."""
    layers: tuple[int, ...]
    """Its layers, in the order of the chunk's parts."""
    last: int | None
    """Last site of the call; None: the model's end."""
    last_shape: int | None
    """Last site of a call for shapes alone, which also makes values that the chunk receives and passes on."""
    entries: dict[str, tuple[Value, ...]]
    """Received values, by the module whose part sends them."""
    leaves: dict[str, tuple[Value, ...]]
    """Sent values, by the module whose part sends them."""
    sends: frozenset[Value]
    """All sent values."""
    present: frozenset[str]
    """Modules that these microbatches call."""


def plan_chunk(split: ModelSplit, chunk: Sequence[Part], present: frozenset[str]) -> ChunkPlan:
    """Plans a chunk for microbatches that call these modules.

    Raises:
        ValueError: They call none of the chunk's modules.
    """
    own = split.sites_of(chunk)
    running = [index for index in own if split.sites[index].module in present]
    if not running:
        raise ValueError(
            f"chunk {'+'.join(map(str, chunk))} has nothing to do with a microbatch that calls "
            f"{', '.join(sorted(present))}; leave it out of the schedule"
        )
    order = {part.module: place for place, part in enumerate(chunk)}
    layers = sorted(
        (index for index in own if split.sites[index].is_layer), key=lambda i: (order[split.sites[i].module], i)
    )
    leaves = _present(split, split.leaves(chunk), present)
    sends = frozenset(value for values in leaves.values() for value in values)
    return ChunkPlan(
        own=own,
        layers=tuple(layers),
        last=None if not split.sites[max(running)].path else max(running),
        last_shape=max([*running, *(value.site for value in sends)]),
        entries=_present(split, split.entries([part for part in chunk if part.module in present]), present),
        leaves=leaves,
        present=present,
        sends=sends,
    )


def plan_nothing(present: frozenset[str]) -> ChunkPlan:
    """Returns the plan of a whole call in which no site runs."""
    return ChunkPlan(
        own=frozenset(),
        layers=(),
        last=None,
        last_shape=None,
        entries={},
        leaves={},
        present=present,
        sends=frozenset(),
    )


def _present(
    split: ModelSplit, values: dict[str, tuple[Value, ...]], present: frozenset[str]
) -> dict[str, tuple[Value, ...]]:
    return {
        module: tuple(value for value in own if split.sites[value.site].module in present)
        for module, own in values.items()
        if module in present
    }
