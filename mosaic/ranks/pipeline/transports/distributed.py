"""Ranks that are processes: messages over torch.distributed, by NCCL on GPUs and gloo on CPUs.

Each direction has a communicator of its own, so that gradients do not queue behind activations: all ranks make them
when the transport is made, in one order, and warm them up pair by pair. With NCCL, torch up to 2.14 makes a
communicator for each pair within them at the pair's first message; made later and in different orders, these would wait
for each other. Newer ones (nccl2) send to all peers through one communicator, where messages to one peer would queue
behind those to another: there each pair is given a group of its own.

On GPUs lanes that message each other have communicators of their own, too: NCCL has no tags, and one lane's messages
would queue behind another's. Gloo tells lanes apart by tags, so that each may post on a thread of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError, RankFailedError
from mosaic.ranks.pipeline.transports.transport import LanePair, Message, Tensors
from mosaic.ranks.world.cancel import CancelledError
from mosaic.ranks.world.groups import peers_share_a_communicator
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World

_MAX_LANES = 256
_Peers = dict[int, dist.ProcessGroup]
_Directions = tuple[_Peers, _Peers]
_Communicators = tuple[_Directions, dist.ProcessGroup]

FRAME_BYTES = 1024
"""What ranks tell each other in one exchange; more takes two others."""


class DistributedTransport:
    """One rank's; see ``mosaic.ranks.pipeline.transports.transport.Transport``. All ranks make it.

    Args:
        world: All ranks; those that are killed are found where it watches them.
        lines: Ranks that send to each other: each rank of the world is in one line, and has its index there as
            ``rank``. None: all are in one. A rank that fails is heard in all lines.
        name: No other transport of the run has it.
    """

    def __init__(self, world: World, *, lines: Sequence[Sequence[int]] | None = None, name: str = "pipeline") -> None:
        self._lines = [tuple(line) for line in ([range(world.size)] if lines is None else lines)]
        self._line = next(line for line in self._lines if world.rank in line)
        self.rank, self.size, self.progress = self._line.index(world.rank), len(self._line), world.progress
        self._world = world
        self._kind = world.device.type
        with world.groups.lending() as self._loan:
            own = [self._communicators(line) for line in self._lines if len(line) > 1]
            self._everyone = world.group(range(world.size), backend="gloo")
        self._groups, self._agreements = next(
            (found for line, found in own if line == self._line), (({}, {}), self._everyone)
        )
        self._warm_up(self._groups)
        self._of_lanes: dict[LanePair, _Directions] = {(0, 0): self._groups}
        self._is_aborted = False
        self._given_up = [*self._loan.groups]
        self._token = world.cancel_token(f"transport/{name}", self._given_up)
        self._token.__enter__()
        self._explain, self.progress.explain = self.progress.explain, self._explained

    def cover(self, group: dist.ProcessGroup) -> None:
        """Takes a communicator of the work, such as one that reduces gradients, that is given up with this one's."""
        if group not in self._given_up:
            self._given_up.append(group)

    def open_lanes(self, pairs: Iterable[LanePair]) -> None:
        """Makes communicators for lanes that have none yet, if tags do not tell them apart."""
        for pair in sorted(set(pairs) - self._of_lanes.keys()) if self._kind == "cuda" else ():
            with self._world.groups.lending() as loan:
                made = {line: self._directions(line) for line in self._lines if len(line) > 1}
            self._loan += loan
            self._given_up += loan.groups
            self._of_lanes[pair] = made.get(self._line, self._groups)
            self._warm_up(self._of_lanes[pair])

    def post_send(self, message: Message, tensors: Tensors) -> _Sent:
        """Begins to send; nothing may write to the tensors until that is done."""
        message.check(tensors)
        held = tuple(tensor.detach().contiguous() for tensor in tensors if tensor.numel())
        if any(tensor.device.type != self._kind for tensor in held):
            raise self._cannot_carry(message, held)
        group, peer, tag = self._channel(message)
        try:
            return _Sent(self, message, held, [dist.isend(each, peer, group, tag) for each in held])
        except RuntimeError as error:
            raise self.progress.explain(error) from error

    def post_receive(self, message: Message) -> _Received:
        """Makes buffers, and begins to receive into them."""
        device, (group, peer, tag) = self._world.device, self._channel(message)
        buffers = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in message.specs)
        try:
            works = [dist.irecv(each, peer, group, tag) for each in buffers if each.numel()]
        except RuntimeError as error:
            raise self.progress.explain(error) from error
        return _Received(self, message, buffers, works)

    def tell(self, text: str) -> tuple[str, ...]:
        """Returns what each rank told."""
        return self._told(text, self._agreements) if self.size > 1 else (text,)

    def tell_all(self, text: str) -> tuple[str, ...]:
        """Returns what each rank of the world told; all of them call it."""
        return self._told(text, self._everyone)

    def _told(self, text: str, group: dist.ProcessGroup) -> tuple[str, ...]:
        with self.progress.waiting(THE_LOOP, "agreement"):
            return _gathered(text.encode(), dist.get_world_size(group), group)

    def _communicators(self, line: Sequence[int]) -> tuple[tuple[int, ...], _Communicators]:
        """Returns those of a line: for each direction one, and one for agreements."""
        return tuple(line), (self._directions(line), self._world.group(line, backend="gloo"))

    def _directions(self, line: Sequence[int]) -> _Directions:
        return self._peers(line), self._peers(line)

    def _peers(self, line: Sequence[int]) -> _Peers:
        """Returns what carries messages to each rank of a line; all ranks of the world call it for all lines."""
        if not peers_share_a_communicator(self._world.everyone):
            return dict.fromkeys(line, self._world.group(line))
        pairs = {pair: self._world.group(pair) for pair in itertools.combinations(sorted(line), 2)}
        mine = {pair: group for pair, group in pairs.items() if self._world.rank in pair}
        return {sum(pair) - self._world.rank: group for pair, group in mine.items()}

    def _channel(self, message: Message) -> tuple[dist.ProcessGroup, int, int]:
        """Returns what carries a message, to or from whom, and its tag.

        Lanes for which nothing was opened share the first ones' communicators: one thread posts what is on GPUs, in one
        order at both ends.
        """
        groups = self._of_lanes.get(message.lanes, self._groups)
        tag = _MAX_LANES * message.lanes[0] + message.lanes[1]
        peer = self._line[message.peer]
        return groups[message.is_forward][peer], peer, tag

    def abort(self, why: str) -> None:
        """Ends the others' waits; the communicators are of no use afterwards."""
        self._is_aborted = True
        try:
            self._token.cancel(why)
        except (RuntimeError, OSError):  # the process that holds the store is gone
            self._token.abort()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A block in which errors of messages that are not the transport's say which rank has failed, too."""
        try:
            yield
        except RuntimeError as error:
            found = self.progress.explain(error)
            if found is error:
                raise
            raise found from error

    def close(self) -> None:
        """Listens no more for ranks that failed, and gives the communicators back, unless a rank has failed."""
        self._token.__exit__(None, None, None)
        (self._world.groups.destroy if self._is_aborted else self._world.groups.give_back)(self._loan)

    def _warm_up(self, groups: _Directions) -> None:
        mark = torch.zeros(1, device=self._world.device)
        with self.progress.waiting(THE_LOOP, "agreement"):
            for peers, (low, high) in itertools.product(groups, itertools.combinations(self._line, 2)):
                if self._world.rank == low:
                    dist.send(mark, high, peers[high])
                    dist.recv(mark, high, peers[high])
                elif self._world.rank == high:
                    dist.recv(mark, low, peers[low])
                    dist.send(mark, low, peers[low])

    def _cannot_carry(self, message: Message, tensors: Tensors) -> BackendUnavailableError:
        found = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        group, _, _ = self._channel(message)
        return BackendUnavailableError(
            f"{dist.get_backend(group)} of ranks on {self._kind} cannot send {message.name}; compute it on "
            f"{self._kind}, give each rank a GPU of its own, or let ranks be threads of one process",
            found=f"tensors on {found}",
            needed=f"tensors on {self._kind}",
        )

    def _explained(self, error: RuntimeError) -> BaseException:
        found = self._explain(error)
        self._is_aborted = self._is_aborted or found is not error
        return RankFailedError(str(found), ranks=(found.rank,)) if isinstance(found, CancelledError) else found


class _Posted:
    """One end of a message under way."""

    __slots__ = ("_message", "_tensors", "_transport", "_works")

    def __init__(
        self, transport: DistributedTransport, message: Message, tensors: Tensors, works: list[dist.Work | None]
    ) -> None:
        self._transport, self._message, self._tensors, self._works = transport, message, tensors, works

    def _await(self) -> Tensors:
        with self._transport.progress.waiting(self._message.name, self._message.phase):
            for work in self._works:
                assert work is not None
                work.wait()
        tensors, self._tensors = self._tensors, ()
        return tensors


class _Sent(_Posted):
    __slots__ = ()

    def wait(self) -> Tensors:
        """Waits until the tensors may be written to."""
        self._await()
        return ()


class _Received(_Posted):
    __slots__ = ()

    def wait(self) -> Tensors:
        """Returns what was received."""
        return self._await()


def _gathered(mine: bytes, size: int, group: dist.ProcessGroup) -> tuple[str, ...]:
    """Returns the texts of all ranks: of short ones in one exchange, where torch's own takes two."""
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    head = len(mine).to_bytes(8, "little") + mine[: FRAME_BYTES - 8]
    frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    frames = list(torch.empty(size, FRAME_BYTES, dtype=torch.uint8))
    dist.all_gather(frames, frame, group=group)
    told = [one.numpy().tobytes() for one in frames]
    lengths = [int.from_bytes(one[:8], "little") for one in told]
    if max(lengths) <= FRAME_BYTES - 8:
        return tuple(one[8 : 8 + length].decode() for one, length in zip(told, lengths, strict=True))
    found: list[bytes] = [b""] * size
    dist.all_gather_object(found, mine, group=group)
    return tuple(one.decode() for one in found)
