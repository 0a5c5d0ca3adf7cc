"""One chunk of one kind of microbatch: which sites run, where the call is left, what comes in and what goes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.graph import Part
from mosaic.parts.split import ModelSplit, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """What is the same for all microbatches that call the same modules."""

    own: frozenset[int]
    """Sites that run."""
    layers: tuple[int, ...]
    """Those of them that are layers, in the order of the chunk's parts."""
    last: int | None
    """The site behind which the call is left; None: the model's end."""
    last_shape: int | None
    """The same where shapes alone are wanted: some values are made behind the chunk, and were received from others."""
    entries: dict[str, tuple[Value, ...]]
    """What is received, by the module whose part sends it."""
    leaves: dict[str, tuple[Value, ...]]
    """What is handed over, by the module whose part sends it."""
    sends: frozenset[Value]
    """All of it."""
    present: frozenset[str]
    """Modules that these microbatches call."""


def plan_chunk(split: ModelSplit, chunk: Sequence[Part], present: frozenset[str]) -> ChunkPlan:
    """Returns what a chunk does with microbatches that call these modules.

    Raises:
        ValueError: They call none of the chunk's.
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
    """Returns the plan of a call in which nothing runs, up to the model's end."""
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
        module: tuple(value for value in found if split.sites[value.site].module in present)
        for module, found in values.items()
        if module in present
    }
