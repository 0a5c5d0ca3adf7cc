"""Ranks that are processes: messages over torch.distributed, by NCCL on GPUs and gloo on CPUs.

Each direction has a communicator of its own, so that gradients do not queue behind activations: all ranks make them
when the transport is made, in one order, and warm them up pair by pair. With NCCL, torch makes a communicator for each
pair within them at the pair's first message; made later and in different orders, these would wait for each other.

Lanes that message each other have communicators of their own, too, on GPUs: NCCL has no tags, and one lane's messages
would queue behind another's. Gloo tells them apart by tags.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError, RankFailedError
from mosaic.ranks.meeting.alarm import Alarm, GivenUpError
from mosaic.ranks.meeting.progress import THE_LOOP
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.transports.transport import LanePair, Message, Tensors

_MAX_LANES = 256


class DistributedTransport:
    """One rank's; see ``mosaic.ranks.pipeline.transports.transport.Transport``. All ranks make it.

    Args:
        world: All ranks; those that are killed are found where it watches them.
        name: No other transport of the run has it.
        others: Communicators of the work, such as those that reduce gradients, that are given up with this one's.
    """

    def __init__(self, world: World, *, name: str = "pipeline", others: Sequence[dist.ProcessGroup] = ()) -> None:
        self.rank, self.size, self.progress = world.rank, world.size, world.progress
        self._world = world
        self._kind = world.device.type
        with world.groups.lending() as self._loan:
            self._groups = {(0, 0): self._directions()}
            self._agreements = world.group(range(world.size), backend="gloo")
        self._is_aborted = False
        self._given_up = [*self._loan.groups, *others]
        self._alarm = Alarm(world.store, world.rank, f"transport/{name}", self._given_up, world.progress)
        self._alarm.__enter__()
        self._explain, self.progress.explain = self.progress.explain, self._explained

    def open_lanes(self, pairs: Iterable[LanePair]) -> None:
        """Makes communicators for lanes that have none yet."""
        for pair in sorted(set(pairs) - self._groups.keys()):
            if self._kind == "cpu":
                self._groups[pair] = self._groups[0, 0]
                continue
            with self._world.groups.lending() as loan:
                self._groups[pair] = self._directions()
            self._loan += loan
            self._given_up += loan.groups

    def post_send(self, message: Message, tensors: Tensors) -> _Sent:
        """Begins to send; nothing may write to the tensors until that is done."""
        message.check(tensors)
        held = tuple(tensor.detach().contiguous() for tensor in tensors if tensor.numel())
        if any(tensor.device.type != self._kind for tensor in held):
            raise self._cannot_carry(message, held)
        group, tag = self._groups[message.lanes][message.is_forward], _tag_of(message.lanes)
        try:
            return _Sent(self, message, held, [dist.isend(each, message.peer, group, tag) for each in held])
        except RuntimeError as error:
            raise self.progress.explain(error) from error

    def post_receive(self, message: Message) -> _Received:
        """Makes buffers, and begins to receive into them."""
        device, group = self._world.device, self._groups[message.lanes][message.is_forward]
        tag = _tag_of(message.lanes)
        buffers = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in message.specs)
        try:
            works = [dist.irecv(each, message.peer, group, tag) for each in buffers if each.numel()]
        except RuntimeError as error:
            raise self.progress.explain(error) from error
        return _Received(self, message, buffers, works)

    def tell(self, text: str) -> tuple[str, ...]:
        """Returns what each rank told."""
        found: list[str] = [""] * self.size
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.all_gather_object(found, text, group=self._agreements)
        return tuple(found)

    def abort(self, why: str) -> None:
        """Ends the others' waits; the communicators are of no use afterwards."""
        self._is_aborted = True
        try:
            self._alarm.ring(why)
        except (RuntimeError, OSError):  # whoever holds the store is gone, which is for the watch to say
            self._alarm.free()

    def close(self) -> None:
        """Listens no more for ranks that failed, and gives the communicators back, unless a rank has failed."""
        self._alarm.__exit__(None, None, None)
        (self._world.groups.destroy if self._is_aborted else self._world.groups.give_back)(self._loan)

    def _directions(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Makes a communicator for gradients and one for activations, and warms them up."""
        everyone = range(self.size)
        made = self._world.group(everyone), self._world.group(everyone)
        for group in made:
            self._warm_up(group)
        return made

    def _warm_up(self, group: dist.ProcessGroup) -> None:
        mark = torch.zeros(1, device=self._world.device)
        with self.progress.waiting(THE_LOOP, "agreement"):
            for low, high in itertools.combinations(range(self.size), 2):
                if self.rank == low:
                    dist.send(mark, high, group)
                    dist.recv(mark, high, group)
                elif self.rank == high:
                    dist.recv(mark, low, group)
                    dist.send(mark, low, group)

    def _cannot_carry(self, message: Message, tensors: Tensors) -> BackendUnavailableError:
        found = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        return BackendUnavailableError(
            f"{dist.get_backend(self._groups[0, 0][1])} of ranks on {self._kind} cannot send {message.name}; compute "
            f"it on {self._kind}, give each rank a GPU of its own, or let ranks be threads of one process",
            found=f"tensors on {found}",
            needed=f"tensors on {self._kind}",
        )

    def _explained(self, error: RuntimeError) -> BaseException:
        found = self._explain(error)
        self._is_aborted = self._is_aborted or found is not error
        return RankFailedError(str(found), ranks=(found.rank,)) if isinstance(found, GivenUpError) else found


def _tag_of(lanes: LanePair) -> int:
    return _MAX_LANES * lanes[0] + lanes[1]


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
