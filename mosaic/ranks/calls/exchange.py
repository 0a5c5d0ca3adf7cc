"""The messages of a routed call: rows of its arguments to the module's ranks, rows of its results back.

With the rows go the facts on which all ranks have to agree: how many rows each holds, and whether calls are alike. Each
rank cuts the first message as the ranks last agreed for this module. Where the facts that arrive are those, so are the
rows, and nothing else has to be compared. Otherwise a second message brings the rows. A rank whose call cannot be
routed sends that instead of rows, so all ranks raise and none waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.engine.calls.structure import flatten
from mosaic.errors import ModuleContractError
from mosaic.ranks.rows.routing import Agreement, RowRouting, routing_of
from mosaic.ranks.world.groups import carrier_of
from mosaic.ranks.world.progress import SentPhase

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked

_FACTS = 6
_ADDED = 2
"""Marks a call with arguments that the sample's step had not."""


def facts_of(
    ranked: Ranked, leaves: Sequence[Any], *, is_there: bool, wants: Sequence[bool], added: str, attributes: str
) -> tuple[int, ...]:
    """Returns the facts of a call that can be routed.

    Args:
        ranked: The module.
        leaves: The arguments.
        is_there: Whether this rank calls the module.
        wants: For each argument, whether it takes a gradient here.
        added: A digest of arguments that the sample's step had not.
        attributes: A digest of attributes that were set in the module since it was colocated.
    """
    cut = list(compress(leaves, ranked.batched))
    values = repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]) + added
    shapes = repr([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in cut])
    digests = [zlib.crc32(text.encode()) for text in (values, shapes, attributes)]
    return len(cut[0]), _ADDED if added else int(is_there), 0, *digests, *map(int, wants)


def failed_facts(ranked: Ranked) -> tuple[int, ...]:
    """Returns the facts of a call that cannot be routed."""
    return (0, 0, 1) + (0,) * (_FACTS - 3 + len(ranked.batched))


def exchange(
    ranked: Ranked, leaves: Sequence[Any], facts: tuple[int, ...], attributes: str, error: ModuleContractError | None
) -> tuple[Agreement, list[Any]]:
    """Agrees on a call with all ranks, and moves the rows of its arguments.

    Args:
        ranked: The module.
        leaves: The arguments; not read where there is an error.
        facts: Of the call; ``failed_facts`` where there is an error.
        attributes: A digest of attributes that were set in the module since it was colocated.
        error: Why this rank's call cannot be routed.

    Returns:
        The agreement, and the arguments with this rank's part of the rows.

    Raises:
        ModuleContractError: Another rank's call cannot be routed, or calls differ in what has to be the same; on all.
    """
    riding = [
        index
        for index, has_rows in enumerate(ranked.batched if error is None else ())
        if has_rows and carrier_of(leaves[index], ranked.group, ranked.control) is ranked.control
    ]
    tensors = [leaves[index] for index in riding]
    before = ranked.agreement
    is_as_before = before is not None and facts == before.facts[ranked.rank]
    table, rows = _with_facts(ranked, facts, tensors if is_as_before else None)
    if before is not None and table == before.facts:
        agreement = before
    else:
        if error is not None:
            raise error
        _check(ranked, table, attributes)
        agreement = ranked.agreement = Agreement(
            facts=table,
            there=tuple(bool(each[1]) for each in table),
            wanted=tuple(map(any, zip(*(each[_FACTS:] for each in table), strict=True))),
            routing=routing_of(tuple(each[0] for each in table), ranked.members),
            row_bytes=sum(_row_bytes(tensor) for tensor in tensors),
        )
        rows = move(ranked, agreement.routing, tensors, "forward")
    moved = dict(zip(riding, rows, strict=True))
    rest = [index for index, has_rows in enumerate(ranked.batched) if has_rows and index not in moved]
    moved.update(zip(rest, move(ranked, agreement.routing, [leaves[index] for index in rest], "forward"), strict=True))
    return agreement, [moved.get(index, leaf) for index, leaf in enumerate(leaves)]


def move(
    ranked: Ranked,
    routing: RowRouting | None,
    tensors: Sequence[torch.Tensor],
    phase: SentPhase,
    *,
    is_back: bool = False,
) -> list[torch.Tensor]:
    """Moves the rows of some tensors to the module's ranks, or back to the ranks that hold them, in one message.

    Messages go over the module's own communicator, so they keep their order.

    Args:
        ranked: The module.
        routing: The way of the rows; None: each rank keeps its own.
        tensors: With as many rows each.
        phase: Of the step.
        is_back: Whether they go to the ranks that hold the rows.
    """
    if routing is None or not routing.num_moved or not tensors:
        return list(tensors)
    sends, receives = routing.sends(ranked.rank), routing.receives(ranked.rank)
    if is_back:
        sends, receives = receives, sends
    found: dict[int, torch.Tensor] = {}
    for group in dict.fromkeys((ranked.control, ranked.group)):
        places = [
            place for place, tensor in enumerate(tensors) if carrier_of(tensor, ranked.group, ranked.control) is group
        ]
        own = [tensors[place].detach() for place in places]
        if own:
            packed = [_packed(own, at, sends) for at in range(ranked.size)]
            each = sum(map(_row_bytes, own))
            with ranked.waiting(phase):
                pieces = _all_to_all(group, ranked.rank, packed, [count * each for count in receives])
            found.update(zip(places, _unpacked(ranked, own, sends, receives, pieces), strict=True))
            _count(ranked, sends, each, phase)
    return [found[place] for place in range(len(tensors))]


def error_of(ranked: Ranked, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> ModuleContractError | None:
    """Returns why a call with these arguments cannot be routed, or None."""
    name = ranked.name
    remedy = f"on several ranks all calls have to be alike: colocate(..., exclude=[{name!r}])"
    if spec != ranked.spec:
        return ModuleContractError(f"{name!r} is called with other arguments than in the sample's step; {remedy}")
    cut = list(compress(leaves, ranked.batched))
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in cut):
        kinds = ", ".join(type(leaf).__name__ for leaf in cut)
        return ModuleContractError(f"{name!r} is called with {kinds} where the sample's step had tensors; {remedy}")
    if len({len(leaf) for leaf in cut}) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in cut)
        return ModuleContractError(
            f"{name!r} is called with {shapes}, which had one leading dimension in the sample's step; {remedy}"
        )
    return None


@dataclass(frozen=True, slots=True)
class UnroutedCall:
    """A module's own call with keyword arguments that are not routed."""

    run: Callable[..., Any]
    """Makes the call."""
    added: Mapping[str, Any]
    """By name; the same on all ranks that call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes it."""
        return self.run(*args, **kwargs, **self.added)


def split_routed_kwargs(
    run: Callable[..., Any], kwargs: dict[str, Any], known: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a module's own call with the keyword arguments that hold no rows, and the other ones.

    Args:
        run: Makes the call.
        kwargs: Its keyword arguments.
        known: Names of those in the sample's step.
    """
    added = {name: value for name, value in kwargs.items() if name not in known and _holds_no_rows(value)}
    if not added:
        return run, kwargs
    return UnroutedCall(run, added), {name: value for name, value in kwargs.items() if name not in added}


def digest_of(run: Callable[..., Any]) -> str:
    """Returns a text for arguments that are not routed, which have to be the same on all ranks; empty for none.

    Of tensors it has shape and type: reading a value would make the host wait for a GPU.
    """
    if not isinstance(run, UnroutedCall):
        return ""
    leaves = [
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(run.added)[0]
    ]
    return f"{sorted(run.added)} {leaves}"


# Parts.


def _with_facts(
    ranked: Ranked, facts: tuple[int, ...], tensors: Sequence[torch.Tensor] | None
) -> tuple[tuple[tuple[int, ...], ...], list[torch.Tensor]]:
    """Sends the facts to all ranks, with the rows as last agreed; without tensors the rows are of no use.

    Returns:
        The facts of all ranks, and the rows, which are of use where all facts are those last agreed on.
    """
    rank, size, agreement = ranked.rank, ranked.size, ranked.agreement
    header = torch.tensor(facts, dtype=torch.int64).view(torch.uint8)
    sends = receives = (0,) * size
    each = 0
    if agreement is not None and agreement.routing.num_moved:
        sends, receives = agreement.routing.sends(rank), agreement.routing.receives(rank)
        each = agreement.row_bytes
    own = [tensor.detach() for tensor in tensors or ()]
    packed = [
        [header, *(_packed(own, at, sends) if tensors is not None else [header.new_zeros(sends[at] * each)])]
        for at in range(size)
    ]
    counts = [header.numel() + count * each for count in receives]
    with ranked.waiting("forward"):
        pieces = _all_to_all(ranked.control, rank, packed, counts)
    found = [facts if at == rank else _facts_in(piece[: header.numel()]) for at, piece in enumerate(pieces)]
    if tensors is None or not each:
        return tuple(found), list(own)
    _count(ranked, sends, each, "forward")
    rows = _unpacked(ranked, own, sends, receives, [piece[header.numel() :] for piece in pieces])
    return tuple(found), rows


def _facts_in(piece: torch.Tensor) -> tuple[int, ...]:
    return tuple(piece.clone().view(torch.int64).tolist())


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * tensor.shape[1:].numel()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _packed(tensors: Iterable[torch.Tensor], to: int, sends: Sequence[int]) -> list[torch.Tensor]:
    """Returns the rows that go to one rank, as bytes."""
    first = sum(sends[:to])
    return [_bytes_of(tensor[first : first + sends[to]]) for tensor in tensors]


def _unpacked(
    ranked: Ranked,
    own: Sequence[torch.Tensor],
    sends: Sequence[int],
    receives: Sequence[int],
    pieces: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Puts tensors together from the bytes that each rank sent, and the rows that stay here."""
    found, starts = [], [0] * ranked.size
    first = sum(sends[: ranked.rank])
    for tensor in own:
        each, parts = _row_bytes(tensor), []
        for rank, count in enumerate(receives):
            if rank == ranked.rank:
                parts.append(_bytes_of(tensor[first : first + count]))
            else:
                parts.append(pieces[rank][starts[rank] : starts[rank] + count * each])
                starts[rank] += count * each
        found.append(torch.cat(parts).view(tensor.dtype).view(sum(receives), *tensor.shape[1:]))
    return found


def _all_to_all(
    group: dist.ProcessGroup, rank: int, packed: Sequence[Sequence[torch.Tensor]], receives: Sequence[int]
) -> list[torch.Tensor]:
    """Sends bytes to each other rank; returns those of each."""
    outgoing = [piece for to, pieces in enumerate(packed) if to != rank for piece in pieces]
    given = torch.cat(outgoing)
    sizes = [0 if to == rank else sum(piece.numel() for piece in pieces) for to, pieces in enumerate(packed)]
    counts = [0 if source == rank else count for source, count in enumerate(receives)]
    made = given.new_empty(sum(counts))
    # NCCL's own stream has the whole device, whatever SMs the current stream is confined to.
    dist.all_to_all_single(made, given, counts, sizes, group=group, async_op=True).wait()
    return list(made.split(counts))


def _count(ranked: Ranked, sends: Sequence[int], row_bytes: int, phase: SentPhase) -> None:
    if num_rows := sum(sends) - sends[ranked.rank]:
        ranked.traffic.add(ranked.name, phase, num_rows * row_bytes)


def _check(ranked: Ranked, table: tuple[tuple[int, ...], ...], attributes: str) -> None:
    """Raises ModuleContractError, on all ranks, where calls differ in what has to be the same."""
    name, calling = ranked.name, [facts for facts in table if facts[1]]
    failed = [str(rank) for rank, facts in enumerate(table) if facts[2]]
    if failed:
        raise ModuleContractError(f"{name!r} could not be called on rank {', '.join(failed)}, which says why")
    if any(facts[1] == _ADDED for facts in table) and len(calling) < len(table):
        raise ModuleContractError(
            f"{name!r} is called with arguments that the sample's step had not, and some ranks do not call it, which "
            "may have to run it for others; colocate with a sample whose step has these arguments"
        )
    running = [facts for rank, facts in enumerate(table) if facts[1] or rank in ranked.members]
    for column, rows, what in (
        (3, calling, "other arguments that are no tensors (numbers, flags, strings), which have to be the same"),
        (
            4,
            running if calling else [],
            "other shapes (but for the number of rows) or types; pad to one length on all ranks",
        ),
    ):
        if len({facts[column] for facts in rows}) > 1:
            raise ModuleContractError(f"{name!r} is called on different ranks with {what}")
    if len({facts[5] for facts in running}) > 1:
        raise ModuleContractError(
            f"attributes of {name!r} were set to other values on some of the ranks (on rank {ranked.rank}: "
            f"{attributes or 'to none'}), and it runs on rows of all of them; pass what differs as an argument, or "
            f"leave it where it is called: colocate(..., exclude=[{name!r}])"
        )


def _holds_no_rows(value: Any) -> bool:
    return all(
        not isinstance(leaf, torch.Tensor) or (not leaf.dim() and not leaf.requires_grad) for leaf in flatten(value)[0]
    )
