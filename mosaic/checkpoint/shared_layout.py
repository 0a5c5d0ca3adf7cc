"""Assignment of tensors to ranks: each is written once, and all ranks write about as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mosaic.checkpoint.optimizer_state import merged_groups
from mosaic.checkpoint.tensor_file import TensorSpec
from mosaic.errors import MosaicError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The tensors and states of one rank, constant from save to save under one plan."""

    tensors: dict[str, TensorSpec]
    names: tuple[str, ...]
    """All tensors of the model and its companions, on any rank."""
    groups: dict[str, list[list[str]]]
    """The parameters of each group, by optimizer."""
    states: dict[str, dict[str, Any]]
    """The state of each parameter, by optimizer, with keys in place of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayout:
    """The merged layout of all ranks."""

    writes: tuple[frozenset[str], ...]
    """Names of the tensors that each rank writes."""
    groups: dict[str, list[list[str]]]
    """As in ``RankLayout``."""
    states: dict[str, dict[str, Any]]
    """As in ``RankLayout``."""

    @staticmethod
    def of(layouts: Sequence[RankLayout]) -> SharedLayout:
        """Merges the layouts of all ranks.

        Raises:
            MosaicError: Two ranks have different tensors of one name, or no rank has a tensor.
        """
        specs: dict[str, tuple[int, TensorSpec]] = {}
        for rank, each in enumerate(layouts):
            for name, spec in each.tensors.items():
                first, first_spec = specs.setdefault(name, (rank, spec))
                if first_spec != spec:
                    raise MosaicError(
                        f"{name} is {spec.dtype} {list(spec.shape)} on rank {rank} and {first_spec.dtype} "
                        f"{list(first_spec.shape)} on rank {first}; all ranks have to hold the same"
                    )
        missing = [name for name in layouts[0].names if name not in specs]
        if missing:
            raise MosaicError(f"no rank has {missing[0]} (and {len(missing) - 1} more); it cannot be saved")
        labels = layouts[0].groups
        return SharedLayout(
            writes=shares([{name: spec.num_bytes for name, spec in each.tensors.items()} for each in layouts]),
            groups={label: merged_groups([each.groups[label] for each in layouts]) for label in labels},
            states={
                label: {name: state for each in layouts for name, state in each.states[label].items()}
                for label in labels
            },
        )


def shares(held: Sequence[Mapping[str, int]]) -> tuple[frozenset[str], ...]:
    """Assigns every tensor to one of the ranks that have it.

    Tensors on a single rank come first, then the largest first, each to the rank with the least load so far.

    Args:
        held: Bytes of the tensors that each rank has, by name.

    Returns:
        The names that each rank writes, equal on all ranks.
    """
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(held):
        for name in tensors:
            holders.setdefault(name, []).append(rank)
    num_bytes = {name: held[ranks[0]][name] for name, ranks in holders.items()}
    assigned: list[set[str]] = [set() for _ in held]
    load = [0] * len(held)
    for name in sorted(holders, key=lambda name: (len(holders[name]) > 1, -num_bytes[name], name)):
        rank = min(holders[name], key=lambda rank: (load[rank], rank))
        assigned[rank].add(name)
        load[rank] += num_bytes[name]
    return tuple(map(frozenset, assigned))
