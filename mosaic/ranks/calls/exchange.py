"""The messages of a routed call: rows of its arguments to the module's ranks, rows of its results back.

Ranks agree on a call once for each new kind of it: they gather its facts (how many rows each rank holds, shapes, types,
flags), check that these fit together, and number them. From then on each message with rows carries the number of its
rank's facts. Each rank cuts the message as in the call before. Where all numbers are those of that call, the rows are
right. Where they are of another known kind, a second message brings the rows. A rank whose call cannot be routed sends
the number of no facts, so all ranks gather facts and raise, and none waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any

import torch
import torch.distributed as dist

from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.routed import Agreement, Facts, RoutedModule
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.world.progress import SentPhase

_NEW = -1
"""The number of facts on which ranks have not agreed yet."""
_MAX_AGREEMENTS = 256
"""Agreements that are remembered: numbers of rows, or values of arguments, may never repeat."""


def exchange(
    routed: RoutedModule, facts: Facts, leaves: Sequence[Any], error: ModuleContractError | None
) -> tuple[Agreement, list[Any]]:
    """Agrees on a call with all ranks; returns the agreement, and the arguments with this rank's part of the rows.

    Raises:
        ModuleContractError: A rank's call cannot be routed (``error`` is this rank's reason), or calls differ in what
            has to be the same; on all ranks.
    """
    with_rows = [] if error is not None else list(compress(range(len(leaves)), routed.batched))
    riding = [index for index in with_rows if routed.carrier_of(leaves[index]) is routed.control]
    tensors, carried = [leaves[index] for index in riding], list[torch.Tensor]()
    last, sends, receives = routed.agreement, (0,) * routed.size, (0,) * routed.size
    if last is not None and last.routing.num_moved and last.row_bytes:  # rows on a GPU travel by themselves
        sends, receives = last.routing.sends(routed.rank), last.routing.receives(routed.rank)
        carried = tensors
        if facts != last.facts[routed.rank]:  # the others expect as many bytes as before
            carried = [torch.zeros(sum(sends), last.row_bytes, dtype=torch.uint8)]
    number = routed.numbers.get(facts, _NEW)
    numbers, rows = _all_to_all(routed, routed.control, carried, sends, receives, "forward", 0, number)
    agreement = routed.agreements.get(numbers)
    if agreement is None:
        agreement = _agree(routed, facts, error, sum(map(_row_bytes, tensors)))
    if agreement is last:
        rows = rows or tensors
        _count(routed, carried, sends, "forward")
    else:
        rows = move(routed, agreement.routing, tensors, "forward")
    routed.agreement = agreement
    moved = dict(zip(riding, rows, strict=True))
    rest = [index for index in with_rows if index not in moved]
    moved.update(zip(rest, move(routed, agreement.routing, [leaves[index] for index in rest], "forward"), strict=True))
    return agreement, [moved.get(index, leaf) for index, leaf in enumerate(leaves)]


def _agree(routed: RoutedModule, facts: Facts, error: ModuleContractError | None, row_bytes: int) -> Agreement:
    """Gathers the facts of all ranks, checks and numbers them."""
    if len(routed.agreements) == _MAX_AGREEMENTS:  # on all ranks alike
        routed.agreements.clear()
        routed.numbers.clear()
    number = routed.numbers.setdefault(facts, len(routed.numbers))
    numbers, table = _gather(routed, number, facts)
    if error is not None:
        raise error
    _check(routed, table, facts.attributes)
    there = [each.is_there for each in table]
    agreement = routed.agreements[numbers] = Agreement(
        facts=table,
        routing=RowRouting(held=tuple(each.rows for each in table), members=routed.members),
        row_bytes=row_bytes,
        wants=tuple(map(any, zip(*(each.wants for each in table), strict=True))),
        source=there.index(True) if any(there) and not all(there) else None,
    )
    return agreement


def _gather(routed: RoutedModule, number: int, facts: Facts) -> tuple[tuple[int, ...], tuple[Facts, ...]]:
    """Returns the numbers of all ranks' facts, and the facts."""
    own, nothing = torch.tensor(list(json.dumps([number, *facts]).encode()), dtype=torch.uint8), [0] * routed.size
    lengths, _ = _all_to_all(routed, routed.control, [], nothing, nothing, "forward", 0, len(own))
    is_other = [rank != routed.rank for rank in range(routed.size)]
    counts = [length * other for length, other in zip(lengths, is_other, strict=True)]
    with routed.waiting("forward"):
        pieces = _swap(routed.control, [[own] * other for other in is_other], counts, 0)
    pieces[routed.rank] = own
    numbers, table = [], []
    for piece in pieces:
        other_number, *values, wants = json.loads(bytes(piece.tolist()))
        numbers.append(other_number)
        table.append(Facts._make([*values, tuple(wants)]))
    return tuple(numbers), tuple(table)


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
    number: int | None = None,
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Sends a number and rows of some tensors to each rank, as bytes; returns the numbers of all ranks and the rows."""
    rank, ranks = routed.rank, range(routed.size)
    header = [] if number is None else [torch.tensor([number]).view(torch.uint8)]
    starts, row_bytes = list(accumulate(sends, initial=0)), list(map(_row_bytes, tensors))
    ahead, each = 8 * len(header), sum(row_bytes)
    data = list(zip(map(_bytes_of, tensors), row_bytes, strict=True))
    parts = [[own[starts[to] * size : starts[to + 1] * size] for own, size in data] for to in ranks]
    outgoing = [[*header, *parts[to]] if to != rank else [] for to in ranks]
    counts = [0 if source == rank else ahead + receives[source] * each for source in ranks]
    with routed.waiting(phase):
        if group is routed.control:
            pieces = _swap(group, outgoing, counts, tag)
        else:  # NCCL's own stream has the whole device, whatever SMs the current stream is confined to
            sent = torch.cat([part for message in outgoing for part in message])
            sizes = [sum(part.numel() for part in message) for message in outgoing]
            received = sent.new_empty(sum(counts))
            dist.all_to_all_single(received, sent, counts, sizes, group=group, async_op=True).wait()
            pieces = list(received.split(counts))
    for source, piece in enumerate(pieces):
        if source != rank:
            parts[source] = list(piece[ahead:].split([receives[source] * size for size in row_bytes]))
    rows = [
        torch.cat(own_parts).view(tensor.dtype).view(sum(receives), *tensor.shape[1:])
        for tensor, own_parts in zip(tensors, zip(*parts, strict=True), strict=True)
    ]
    if number is None:
        return (), rows
    return tuple(number if at == rank else pieces[at][:ahead].view(torch.int64).tolist()[0] for at in ranks), rows


def _swap(
    control: dist.ProcessGroup, outgoing: Sequence[Sequence[torch.Tensor]], counts: Sequence[int], tag: int
) -> list[torch.Tensor]:
    """Sends bytes in host memory to each rank, and returns those that come from each.

    Messages in host memory have tags, so those of ranks in different places of a step never meet.
    """
    pieces = [torch.empty(count, dtype=torch.uint8) for count in counts]
    works = [control.recv([piece], source, tag) for source, piece in enumerate(pieces) if counts[source]]
    for to, parts in enumerate(outgoing):
        if sum(part.numel() for part in parts):
            works.append(control.send([parts[0] if len(parts) == 1 else torch.cat(list(parts))], to, tag))
    for work in works:
        work.wait()
    return pieces


def _count(routed: RoutedModule, tensors: Sequence[torch.Tensor], sends: Sequence[int], phase: SentPhase) -> None:
    if num_bytes := (sum(sends) - sends[routed.rank]) * sum(map(_row_bytes, tensors)):
        routed.traffic.add(routed.name, phase, num_bytes)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * tensor.shape[1:].numel()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _check(routed: RoutedModule, table: Sequence[Facts], attributes: str) -> None:
    """Raises ModuleContractError, on all ranks, where calls differ in what has to be the same."""
    for rank, facts in enumerate(table):
        if facts.error:
            raise ModuleContractError(f"{routed.name!r} could not be called on rank {rank}: {facts.error}")
    calling = [facts for facts in table if facts.is_there]
    running = [facts for rank, facts in enumerate(table) if facts.is_there or rank in routed.members]
    rules = (
        (
            len(calling) == len(table) or not any(facts.added for facts in table),
            "is called with arguments that the sample's step had not, and some ranks do not call it, which may have to "
            "run it for others; colocate with a sample whose step has these arguments",
        ),
        (
            len({(facts.values, facts.added) for facts in calling}) < 2,
            "is called on different ranks with other arguments that are no tensors (numbers, flags, strings), which "
            "have to be the same",
        ),
        (
            not calling or len({facts.shapes for facts in running}) < 2,
            "is called on different ranks with other shapes (but for the number of rows) or types; pad to one length "
            "on all ranks",
        ),
        (
            len({facts.attributes for facts in running}) < 2,
            f"has attributes that were set to other values on some of the ranks (on rank {routed.rank}: "
            f"{attributes or 'to none'}), and it runs on rows of all of them; pass what differs as an argument, or "
            f"leave it where it is called: colocate(..., exclude=[{routed.name!r}])",
        ),
    )
    for is_kept, problem in rules:
        if not is_kept:
            raise ModuleContractError(f"{routed.name!r} {problem}")
