"""Who writes what: a tensor that several ranks have is written by one of them, so that all write about as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
