"""The messages of a routed call: rows of its arguments to the module's ranks, rows of its results back.

With the rows go the facts on which all ranks have to agree: how many rows each holds, and whether calls are alike. Each
rank cuts the first message as the ranks last agreed for this module. Where the facts that arrive are those, so are the
rows, and nothing else has to be compared. Otherwise a second message brings the rows. A rank whose call cannot be
routed sends that instead of rows, so all ranks raise and none waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.routed import ADDED, Agreement, CallRequest, Facts, RoutedModule
from mosaic.ranks.rows.routing import RowRouting, routing_of
from mosaic.ranks.world.progress import SentPhase


def exchange(request: CallRequest, leaves: Sequence[Any], wants: Sequence[bool]) -> tuple[Agreement, list[Any]]:
    """Agrees on a call with all ranks; returns the agreement, and the arguments with this rank's part of the rows.

    Raises:
        ModuleContractError: A rank's call cannot be routed, or calls differ in what has to be the same; on all ranks.
    """
    routed, batched = request.routed, request.routed.batched if request.error is None else ()
    facts = Facts.of(request, leaves, wants)
    with_rows = [index for index, has_rows in enumerate(batched) if has_rows]
    riding = [index for index in with_rows if routed.carrier_of(leaves[index]) is routed.control]
    tensors, carried = [leaves[index] for index in riding], list[torch.Tensor]()
    before, sends, receives = routed.agreement, (0,) * routed.size, (0,) * routed.size
    if before is not None and before.routing.num_moved and before.row_bytes:  # rows on a GPU travel by themselves
        sends, receives = before.routing.sends(routed.rank), before.routing.receives(routed.rank)
        carried = tensors
        if facts != before.facts[routed.rank]:  # the others expect as many bytes as before
            carried = [torch.zeros(sum(sends), before.row_bytes, dtype=torch.uint8)]
    heads, rows = _all_to_all(routed, routed.control, carried, sends, receives, "forward", 0, facts.numbers)
    table = tuple(map(Facts.of_numbers, heads))
    if before is not None and table == before.facts:
        agreement, rows = before, rows or tensors
        _count(routed, carried, sends, "forward")
    else:
        if request.error is not None:
            raise request.error
        _check(routed, table, request.attributes)
        agreement = routed.agreement = Agreement(
            facts=table,
            routing=routing_of(tuple(each.rows for each in table), routed.members),
            row_bytes=sum(map(_row_bytes, tensors)),
        )
        rows = move(routed, agreement.routing, tensors, "forward")
    moved = dict(zip(riding, rows, strict=True))
    rest = [index for index in with_rows if index not in moved]
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

    Without a routing each rank keeps its own. Messages go over the module's own communicator, so they keep their order.
    """
    if routing is None or not routing.num_moved or not tensors:
        return list(tensors)
    sends, receives = routing.sends(routed.rank), routing.receives(routed.rank)
    if is_back:
        sends, receives = receives, sends
    moved: dict[int, torch.Tensor] = {}
    for group in dict.fromkeys((routed.control, routed.group)):
        places = [place for place, tensor in enumerate(tensors) if routed.carrier_of(tensor) is group]
        if places:
            own, tag = [tensors[place] for place in places], 1 + 2 * (phase == "backward") + is_back
            moved.update(zip(places, _all_to_all(routed, group, own, sends, receives, phase, tag)[1], strict=True))
            _count(routed, own, sends, phase)
    return [moved[place] for place in range(len(tensors))]


def _all_to_all(
    routed: RoutedModule,
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    sends: Sequence[int],
    receives: Sequence[int],
    phase: SentPhase,
    tag: int,
    facts: tuple[int, ...] = (),
) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
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
    heads = [facts if at == rank else tuple(pieces[at][:ahead].view(torch.int64).tolist()) for at in ranks]
    return heads, rows


def _count(routed: RoutedModule, tensors: Sequence[torch.Tensor], sends: Sequence[int], phase: SentPhase) -> None:
    if num_bytes := (sum(sends) - sends[routed.rank]) * sum(map(_row_bytes, tensors)):
        routed.traffic.add(routed.name, phase, num_bytes)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * tensor.shape[1:].numel()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _check(routed: RoutedModule, table: Sequence[Facts], attributes: str) -> None:
    """Raises ModuleContractError, on all ranks, where calls differ in what has to be the same."""
    name, calling = routed.name, [facts for facts in table if facts.is_there]
    failed = [str(rank) for rank, facts in enumerate(table) if facts.has_failed]
    if failed:
        raise ModuleContractError(f"{name!r} could not be called on rank {', '.join(failed)}, which says why")
    if any(facts.is_there == ADDED for facts in table) and len(calling) < len(table):
        raise ModuleContractError(
            f"{name!r} is called with arguments that the sample's step had not, and some ranks do not call it, which "
            "may have to run it for others; colocate with a sample whose step has these arguments"
        )
    running = [facts for rank, facts in enumerate(table) if facts.is_there or rank in routed.members]
    if len({facts.values for facts in calling}) > 1:
        raise ModuleContractError(
            f"{name!r} is called on different ranks with other arguments that are no tensors (numbers, flags, "
            "strings), which have to be the same"
        )
    if calling and len({facts.shapes for facts in running}) > 1:
        raise ModuleContractError(
            f"{name!r} is called on different ranks with other shapes (but for the number of rows) or types; pad to "
            "one length on all ranks"
        )
    if len({facts.attributes for facts in running}) > 1:
        raise ModuleContractError(
            f"attributes of {name!r} were set to other values on some of the ranks (on rank {routed.rank}: "
            f"{attributes or 'to none'}), and it runs on rows of all of them; pass what differs as an argument, or "
            f"leave it where it is called: colocate(..., exclude=[{name!r}])"
        )
