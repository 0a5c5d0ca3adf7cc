"""The tensors of all ranks, shared out so that each is written once and all write about as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mosaic.checkpoint.optimizer_state import merged_groups
from mosaic.checkpoint.tensor_file import TensorSpec
from mosaic.errors import MosaicError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """What one rank has; it stays the same from save to save under one plan."""

    tensors: dict[str, TensorSpec]
    """Its tensors."""
    names: tuple[str, ...]
    """All tensors of the model and its companions, those of other ranks, too."""
    groups: dict[str, list[list[str]]]
    """For each optimizer the parameters of each of its groups."""
    states: dict[str, dict[str, Any]]
    """For each optimizer what it keeps of each parameter, with keys in the place of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayout:
    """What all ranks have together."""

    writes: tuple[frozenset[str], ...]
    """Names of the tensors that each rank writes."""
    groups: dict[str, list[list[str]]]
    """As in ``RankLayout``."""
    states: dict[str, dict[str, Any]]
    """As in ``RankLayout``."""

    @staticmethod
    def of(told: Sequence[RankLayout]) -> SharedLayout:
        """Joins what the ranks told.

        Raises:
            MosaicError: Two ranks hold different tensors of one name, or no rank holds one.
        """
        known: dict[str, tuple[int, TensorSpec]] = {}
        for rank, each in enumerate(told):
            for name, spec in each.tensors.items():
                first, found = known.setdefault(name, (rank, spec))
                if found != spec:
                    raise MosaicError(
                        f"{name} is {spec.dtype} {list(spec.shape)} on rank {rank} and {found.dtype} "
                        f"{list(found.shape)} on rank {first}; all ranks have to hold the same"
                    )
        lost = [name for name in told[0].names if name not in known]
        if lost:
            raise MosaicError(f"no rank has {lost[0]} (and {len(lost) - 1} more); it cannot be saved")
        labels = told[0].groups
        return SharedLayout(
            writes=shares([{name: spec.num_bytes for name, spec in each.tensors.items()} for each in told]),
            groups={label: merged_groups([each.groups[label] for each in told]) for label in labels},
            states={
                label: {name: state for each in told for name, state in each.states[label].items()} for label in labels
            },
        )


def shares(held: Sequence[Mapping[str, int]]) -> tuple[frozenset[str], ...]:
    """Gives every tensor to one of the ranks that have it.

    The largest first, each to the one with the least so far; what only one rank has is given first of all.

    Args:
        held: Bytes of the tensors that each rank has, by name.

    Returns:
        The names that each rank writes; the same wherever it is computed.
    """
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(held):
        for name in tensors:
            holders.setdefault(name, []).append(rank)
    num_bytes = {name: held[ranks[0]][name] for name, ranks in holders.items()}
    given: list[set[str]] = [set() for _ in held]
    load = [0] * len(held)
    for name in sorted(holders, key=lambda name: (len(holders[name]) > 1, -num_bytes[name], name)):
        rank = min(holders[name], key=lambda rank: (load[rank], rank))
        given[rank].add(name)
        load[rank] += num_bytes[name]
    return tuple(map(frozenset, given))
