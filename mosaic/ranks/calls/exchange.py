"""The messages of a routed call: rows of its arguments to the module's ranks, rows of its results back.

With the rows go the facts on which all ranks have to agree: how many rows each holds, and whether calls are alike. Each
rank cuts the first message as the ranks last agreed for this module. Where the facts that arrive are those, so are the
rows, and nothing else has to be compared. Otherwise a second message brings the rows. A rank whose call cannot be
routed sends that instead of rows, so all ranks raise and none waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate, compress
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
    from mosaic.ranks.calls.routed import RoutedModule

_FACTS = 6
_ADDED = 2
"""Marks a call with arguments that the sample's step had not."""


def exchange(
    routed: RoutedModule,
    leaves: Sequence[Any],
    *,
    is_there: bool,
    wants: Sequence[bool],
    added: str,
    attributes: str,
    error: ModuleContractError | None,
) -> tuple[Agreement, list[Any]]:
    """Agrees on a call with all ranks, and moves the rows of its arguments.

    Args:
        routed: The module.
        leaves: The arguments; not read where there is an error.
        is_there: Whether this rank calls the module.
        wants: For each argument, whether it takes a gradient here.
        added: A digest of arguments that the sample's step had not.
        attributes: A digest of attributes that were set in the module since it was colocated.
        error: Why this rank's call cannot be routed.

    Returns:
        The agreement, and the arguments with this rank's part of the rows.

    Raises:
        ModuleContractError: A rank's call cannot be routed, or calls differ in what has to be the same; on all ranks.
    """
    if error is None:
        cut = list(compress(leaves, routed.batched))
        values = repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]) + added
        shapes = repr([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in cut])
        digests = [zlib.crc32(text.encode()) for text in (values, shapes, attributes)]
        facts = (len(cut[0]), _ADDED if added else int(is_there), 0, *digests, *map(int, wants))
    else:
        facts = (0, 0, 1) + (0,) * (_FACTS - 3 + len(routed.batched))
    riding = [
        index
        for index, has_rows in enumerate(routed.batched if error is None else ())
        if has_rows and carrier_of(leaves[index], routed.group, routed.control) is routed.control
    ]
    tensors = [leaves[index] for index in riding]
    before = routed.agreement
    if before is None or not before.routing.num_moved or not before.row_bytes:  # rows on a GPU travel by themselves
        sends = receives = (0,) * routed.size
        carried = []
    else:
        sends, receives = before.routing.sends(routed.rank), before.routing.receives(routed.rank)
        carried = tensors
        if facts != before.facts[routed.rank]:  # the others expect as many bytes as before
            carried = [torch.zeros(sum(sends), before.row_bytes, dtype=torch.uint8)]
    table, rows = _all_to_all(routed, routed.control, carried, sends, receives, "forward", 0, facts)
    if before is not None and table == before.facts:
        agreement, rows = before, rows or tensors
        _count(routed, carried, sends, "forward")
    else:
        if error is not None:
            raise error
        _check(routed, table, attributes)
        agreement = routed.agreement = Agreement(
            facts=table,
            there=tuple(bool(each[1]) for each in table),
            wanted=tuple(map(any, zip(*(each[_FACTS:] for each in table), strict=True))),
            routing=routing_of(tuple(each[0] for each in table), routed.members),
            row_bytes=sum(map(_row_bytes, tensors)),
        )
        rows = move(routed, agreement.routing, tensors, "forward")
    moved = dict(zip(riding, rows, strict=True))
    rest = [index for index, has_rows in enumerate(routed.batched) if has_rows and index not in moved]
    moved.update(zip(rest, move(routed, agreement.routing, [leaves[index] for index in rest], "forward"), strict=True))
    return agreement, [moved.get(index, leaf) for index, leaf in enumerate(leaves)]


def move(
    routed: RoutedModule,
    routing: RowRouting | None,
    tensors: Sequence[torch.Tensor],
    phase: SentPhase,
    *,
    is_back: bool = False,
) -> list[torch.Tensor]:
    """Moves the rows of some tensors to the module's ranks, or back to the ranks that hold them, in one message.

    Messages go over the module's own communicator, so they keep their order.

    Args:
        routed: The module.
        routing: The way of the rows; None: each rank keeps its own.
        tensors: With as many rows each.
        phase: Of the step.
        is_back: Whether they go to the ranks that hold the rows.
    """
    if routing is None or not routing.num_moved or not tensors:
        return list(tensors)
    sends, receives = routing.sends(routed.rank), routing.receives(routed.rank)
    if is_back:
        sends, receives = receives, sends
    moved: dict[int, torch.Tensor] = {}
    for group in dict.fromkeys((routed.control, routed.group)):
        places = [
            place for place, tensor in enumerate(tensors) if carrier_of(tensor, routed.group, routed.control) is group
        ]
        if places:
            own, tag = [tensors[place] for place in places], 1 + 2 * (phase == "backward") + is_back
            moved.update(zip(places, _all_to_all(routed, group, own, sends, receives, phase, tag)[1], strict=True))
            _count(routed, own, sends, phase)
    return [moved[place] for place in range(len(tensors))]


def error_of(routed: RoutedModule, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> ModuleContractError | None:
    """Returns why a call with these arguments cannot be routed, or None."""
    name = routed.name
    remedy = f"on several ranks all calls have to be alike: colocate(..., exclude=[{name!r}])"
    if spec != routed.spec:
        return ModuleContractError(f"{name!r} is called with other arguments than in the sample's step; {remedy}")
    cut = list(compress(leaves, routed.batched))
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in cut):
        kinds = ", ".join(type(leaf).__name__ for leaf in cut)
        return ModuleContractError(f"{name!r} is called with {kinds} where the sample's step had tensors; {remedy}")
    if len({len(leaf) for leaf in cut}) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in cut)
        return ModuleContractError(
            f"{name!r} is called with {shapes}, which had one leading dimension in the sample's step; {remedy}"
        )
    return None


def split_routed_kwargs(
    run: Callable[..., Any], kwargs: dict[str, Any], known: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """Returns a module's own call with the keyword arguments that hold no rows, the other ones, and a digest.

    The digest of arguments that are not routed has to be the same on all ranks; it is empty for none. Of tensors it has
    shape and type: reading a value would make the host wait for a GPU.
    """
    added = {name: value for name, value in kwargs.items() if name not in known and _holds_no_rows(value)}
    if not added:
        return run, kwargs, ""
    leaves = [(leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(added)[0]]
    rest = {name: value for name, value in kwargs.items() if name not in added}
    return partial(run, **added), rest, f"{sorted(added)} {leaves}"


# Parts.


def _all_to_all(
    routed: RoutedModule,
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    sends: Sequence[int],
    receives: Sequence[int],
    phase: SentPhase,
    tag: int,
    facts: tuple[int, ...] = (),
) -> tuple[tuple[tuple[int, ...], ...], list[torch.Tensor]]:
    """Sends facts and rows of some tensors to each rank, as bytes; returns the facts of all ranks and the rows.

    Messages in host memory have tags, so those of ranks in different places of a step never meet.
    """
    rank, ranks = routed.rank, range(routed.size)
    header = [torch.tensor(facts, dtype=torch.int64).view(torch.uint8)] if facts else []
    ahead, each = 8 * len(facts), sum(map(_row_bytes, tensors))
    starts = list(accumulate(sends, initial=0))
    own = [tensor.detach() for tensor in tensors]
    outgoing = [
        [*header, *(_bytes_of(tensor[starts[to] : starts[to + 1]]) for tensor in own)] if to != rank else []
        for to in ranks
    ]
    counts = [0 if source == rank else ahead + receives[source] * each for source in ranks]
    with routed.waiting(phase):
        if group is routed.control:
            pieces = [torch.empty(count, dtype=torch.uint8) for count in counts]
            works = [group.recv([piece], source, tag) for source, piece in enumerate(pieces) if counts[source]]
            for to, parts in enumerate(outgoing):
                if sum(part.numel() for part in parts):
                    works.append(group.send([parts[0] if len(parts) == 1 else torch.cat(parts)], to, tag))
            for work in works:
                work.wait()
        else:  # NCCL's own stream has the whole device, whatever SMs the current stream is confined to
            sent = torch.cat([part for parts in outgoing for part in parts])
            sizes = [sum(part.numel() for part in parts) for parts in outgoing]
            received = sent.new_empty(sum(counts))
            dist.all_to_all_single(received, sent, counts, sizes, group=group, async_op=True).wait()
            pieces = list(received.split(counts))
    offsets, rows = [ahead] * routed.size, []
    for tensor in own:
        parts = []
        for source in ranks:
            if source == rank:
                parts.append(_bytes_of(tensor[starts[rank] : starts[rank + 1]]))
            else:
                end = offsets[source] + receives[source] * _row_bytes(tensor)
                parts.append(pieces[source][offsets[source] : end])
                offsets[source] = end
        rows.append(torch.cat(parts).view(tensor.dtype).view(sum(receives), *tensor.shape[1:]))
    heads = [facts if at == rank else pieces[at][:ahead].view(torch.int64).tolist() for at in ranks]
    return tuple(map(tuple, heads)), rows


def _count(routed: RoutedModule, tensors: Sequence[torch.Tensor], sends: Sequence[int], phase: SentPhase) -> None:
    if num_bytes := (sum(sends) - sends[routed.rank]) * sum(map(_row_bytes, tensors)):
        routed.traffic.add(routed.name, phase, num_bytes)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * tensor.shape[1:].numel()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _check(routed: RoutedModule, table: tuple[tuple[int, ...], ...], attributes: str) -> None:
    """Raises ModuleContractError, on all ranks, where calls differ in what has to be the same."""
    name, calling = routed.name, [facts for facts in table if facts[1]]
    failed = [str(rank) for rank, facts in enumerate(table) if facts[2]]
    if failed:
        raise ModuleContractError(f"{name!r} could not be called on rank {', '.join(failed)}, which says why")
    if any(facts[1] == _ADDED for facts in table) and len(calling) < len(table):
        raise ModuleContractError(
            f"{name!r} is called with arguments that the sample's step had not, and some ranks do not call it, which "
            "may have to run it for others; colocate with a sample whose step has these arguments"
        )
    running = [facts for rank, facts in enumerate(table) if facts[1] or rank in routed.members]
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
            f"attributes of {name!r} were set to other values on some of the ranks (on rank {routed.rank}: "
            f"{attributes or 'to none'}), and it runs on rows of all of them; pass what differs as an argument, or "
            f"leave it where it is called: colocate(..., exclude=[{name!r}])"
        )


def _holds_no_rows(value: Any) -> bool:
    return all(
        not isinstance(leaf, torch.Tensor) or (not leaf.dim() and not leaf.requires_grad) for leaf in flatten(value)[0]
    )
