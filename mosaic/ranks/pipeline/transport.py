"""Messages between the ranks of a pipeline over torch.distributed, by NCCL on GPUs and gloo on CPUs.

A channel is a pair of ranks, a lane of each, and a direction: activations go forward, gradients backward. Both ends
post its messages in one order, and those of one task as one group by ``batch_isend_irecv``: NCCL then launches one
kernel for all of their tensors. A wait for one message of a group may wait for all of them. Posting never waits.

Each direction has a communicator of its own, so that gradients do not queue behind activations: all ranks make them in
one order, and warm them up pair by pair. NCCL (up to torch 2.14) sends groups and single messages through different
communicators, so everything is posted as a group, and no message overtakes another. There each pair of ranks has a
process group of its own, and so have lanes that message each other: NCCL has no tags, and messages would queue behind
others. Gloo tells lanes apart by tags, so that each may post on a thread of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mosaic.checkpoint.checkpointer import gather_objects
from mosaic.errors import BackendUnavailableError, ModuleContractError, RankFailedError
from mosaic.ranks.world.failures import CancelledError
from mosaic.ranks.world.groups import peers_share_a_communicator
from mosaic.ranks.world.progress import THE_LOOP, RankProgress, SentPhase
from mosaic.ranks.world.world import World

Tensors = tuple[torch.Tensor, ...]
LanePair = tuple[int, int]
"""A lane of the sender and one of the receiver, each counted from 0 on its rank."""

Line = tuple[int, ...]
"""Ranks of the world by place in the pipeline."""

_MAX_LANES = 256
_Peers = dict[int, dist.ProcessGroup]
_Directions = tuple[_Peers, _Peers]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a message; ``str`` gives ``float32[3, 4]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as this rank sees it."""

    name: str
    """Its edge, ``2F0>5F0``."""
    peer: int
    """The rank at its other end."""
    is_forward: bool
    """Its direction."""
    specs: tuple[TensorSpec, ...]
    """Its tensors, known to both ends beforehand."""
    lanes: LanePair = (0, 0)
    """Lanes at its two ends."""

    @property
    def phase(self) -> SentPhase:
        return "forward" if self.is_forward else "backward"

    def check(self, tensors: Tensors) -> None:
        """Raises ModuleContractError unless the tensors fit: gloo accepts shorter messages without an error."""
        actual = tuple(map(TensorSpec.of, tensors))
        if actual == self.specs:
            return
        sent, planned = (", ".join(map(str, specs)) or "nothing" for specs in (actual, self.specs))
        raise ModuleContractError(
            f"{self.name} is planned to carry {planned}, and {sent} was made; both ranks have to know shapes and types "
            "beforehand: let inputs determine them, and not attributes that the loop changes"
        )


@dataclass(slots=True)
class Pending:
    """One end of a message under way."""

    _progress: RankProgress
    _message: Message
    _works: list[dist.Work]
    _held: Tensors
    _result: Tensors

    def wait(self) -> Tensors:
        """Returns received tensors once they are there; of sent ones nothing, once they may be written to.

        Raises:
            RankFailedError: Another rank has failed, or is gone.
        """
        with self._progress.waiting(self._message.name, self._message.phase):
            for work in self._works:
                work.wait()
        result, self._result, self._held = self._result, (), ()
        return result


class Transport:
    """Connects this rank with the others of its pipeline. All ranks of the world make it.

    Args:
        world: All ranks; its watchdog finds those that are killed.
        lines: Ranks that send to each other: each rank of the world is in one or more lines, and has the same index in
            all of them as ``rank``. It receives in the first of its lines, and sends to the ranks that receive in a
            line with it. None: all are in one. A failure of a rank ends the waits in all lines.
    """

    def __init__(self, world: World, *, lines: Sequence[Sequence[int]] | None = None, name: str = "pipeline") -> None:
        self._lines = [tuple(line) for line in ([range(world.size)] if lines is None else lines)]
        own = [line for line in self._lines if world.rank in line]
        self.line = own[0]
        self.rank, self.size, self.progress = self.line.index(world.rank), len(self.line), world.progress
        self._world = world
        self._kind = world.device.type
        with world.lending() as self._loan:
            self._everyone = world.group(range(world.size), backend="gloo")
            groups = {line: self._directions(line) for line in self._lines if len(line) > 1}
        self._groups = {line: groups[line] for line in own if len(line) > 1}
        self._warm_up(self._groups)
        self._of_lanes: dict[LanePair, dict[Line, _Directions]] = {(0, 0): self._groups}
        first = {rank: line for line in reversed(self._lines) for rank in line}
        self._targets = [[line for line in own if first[line[at]] is line] for at in range(self.size)]
        self._is_aborted = False
        self._covered = [*self._loan.groups]
        self._token = world.cancel_token(f"transport/{name}", self._covered)
        self._token.__enter__()
        self._explain, self.progress.explain = self.progress.explain, self._explained

    def cover(self, group: dist.ProcessGroup) -> None:
        """Adds a communicator, such as one that reduces gradients, to those that are aborted with this transport."""
        if group not in self._covered:
            self._covered.append(group)

    def open_lanes(self, pairs: Iterable[LanePair]) -> None:
        """Makes communicators for new pairs of lanes, unless tags tell them apart; all ranks pass the same pairs."""
        for pair in sorted(set(pairs) - self._of_lanes.keys()) if self._kind == "cuda" else ():
            with self._world.lending() as loan:
                groups = {line: self._directions(line) for line in self._lines if len(line) > 1}
            self._loan += loan
            self._covered += loan.groups
            self._of_lanes[pair] = {line: groups[line] for line in self._groups}
            self._warm_up(self._of_lanes[pair])

    def post(self, messages: Sequence[Message], tensors: Sequence[Tensors | None]) -> list[Pending]:
        """Begins messages of one channel as one group; nothing may write to tensors until ``wait`` has returned.

        Args:
            messages: All sent, or all received, by this rank; the other end posts the same in one group.
            tensors: Of each message that is sent; None for one that is received, whose buffers are allocated.

        Raises:
            ModuleContractError: The tensors are not those of the message.
            BackendUnavailableError: They are on another device than the rank.
            RankFailedError: Another rank has failed, or is gone.
        """
        for message, own in zip(messages, tensors, strict=True):
            if own is not None:
                message.check(own)
        is_sent = tensors[0] is not None
        lines = self._targets[messages[0].peer] if is_sent else (self.line,)
        channels = [self._channel(messages[0], line) for line in lines]
        buffers = [
            self._buffers(message) if own is None else self._sendable(message, own)
            for message, own in zip(messages, tensors, strict=True)
        ]
        works: list[list[dist.Work]] = [[] for _ in messages]
        for group, peer, tag in channels:
            operation = dist.isend if is_sent else dist.irecv
            carried = [buffer for own in buffers for buffer in own if buffer.numel()]
            with self.progress.explaining():
                operations = [dist.P2POp(operation, each, peer, group, tag) for each in carried]
                begun = dist.batch_isend_irecv(operations) if operations else []
            following = iter(begun)
            for own_works, own in zip(works, buffers, strict=True):
                is_one = len(begun) < len(carried)  # NCCL's: all messages of the group end together
                own_works += begun if is_one else itertools.islice(following, sum(each.numel() > 0 for each in own))
        return [
            Pending(self.progress, message, own_works, own, () if is_sent else own)
            for message, own_works, own in zip(messages, works, buffers, strict=True)
        ]

    def _buffers(self, message: Message) -> Tensors:
        device = self._world.device
        return tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in message.specs)

    def _sendable(self, message: Message, tensors: Tensors) -> Tensors:
        held = tuple(tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors if tensor.numel())
        if self._targets[message.peer] and any(tensor.device.type != self._kind for tensor in held):
            group, _, _ = self._channel(message, self._targets[message.peer][0])
            raise BackendUnavailableError(
                f"{dist.get_backend(group)} of ranks on {self._kind} cannot send {message.name}; compute it on "
                f"{self._kind}, or give each rank a GPU of its own",
                found=f"tensors on {', '.join(sorted({str(tensor.device) for tensor in held}))}",
                needed=f"tensors on {self._kind}",
            )
        return held

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the value of each rank of the world; all of them call it."""
        with self.progress.waiting(THE_LOOP, "agreement"):
            return gather_objects(self._everyone, value)

    def abort(self, reason: str) -> None:
        """Makes the waits of all ranks raise RankFailedError, ``rank 1 {reason}``; the first reason counts.

        No message goes through the transport afterwards.
        """
        self._is_aborted = True
        try:
            self._token.cancel(reason)
        except (RuntimeError, OSError):  # the process that holds the store is gone
            self._token.abort()

    def close(self) -> None:
        """Returns the communicators, unless a rank has failed; nothing of this rank may be under way."""
        self._token.__exit__(None, None, None)
        (self._world.destroy if self._is_aborted else self._world.give_back)(self._loan)

    def _directions(self, line: Sequence[int]) -> _Directions:
        return self._peers(line), self._peers(line)

    def _peers(self, line: Sequence[int]) -> _Peers:
        """Returns the communicator to each rank of a line; all ranks of the world call it for all lines."""
        if not peers_share_a_communicator(self._world.everyone):
            return dict.fromkeys(line, self._world.group(line))
        pairs = {pair: self._world.group(pair) for pair in itertools.combinations(sorted(line), 2)}
        mine = {pair: group for pair, group in pairs.items() if self._world.rank in pair}
        return {sum(pair) - self._world.rank: group for pair, group in mine.items()}

    def _channel(self, message: Message, line: Line) -> tuple[dist.ProcessGroup, int, int]:
        """Returns the communicator of a message in a line, its peer there, and its tag.

        Lanes without communicators of their own share the first ones': one thread posts what is on GPUs, in one order
        at both ends.
        """
        groups = self._of_lanes.get(message.lanes, self._groups)
        tag = _MAX_LANES * message.lanes[0] + message.lanes[1]
        peer = line[message.peer]
        return groups[line][message.is_forward][peer], peer, tag

    def _warm_up(self, groups: Mapping[Line, _Directions]) -> None:
        mark = torch.zeros(1, device=self._world.device)
        pairs = [
            (peers, *pair)
            for line, directions in groups.items()
            for peers, pair in itertools.product(directions, itertools.combinations(line, 2))
        ]
        with self.progress.waiting(THE_LOOP, "agreement"):
            for peers, low, high in pairs:
                if self._world.rank in (low, high):
                    peer = low + high - self._world.rank
                    marks = (dist.isend, mark), (dist.irecv, torch.empty_like(mark))
                    both = [dist.P2POp(operation, each, peer, peers[peer]) for operation, each in marks]
                    for work in dist.batch_isend_irecv(both):
                        work.wait()

    def _explained(self, error: RuntimeError) -> BaseException:
        explained = self._explain(error)
        self._is_aborted = self._is_aborted or explained is not error
        if isinstance(explained, CancelledError):
            return RankFailedError(str(explained), ranks=(explained.rank,))
        return explained
