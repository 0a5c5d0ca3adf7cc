"""The last write and reads of each storage; an access that is not ordered after them is a race."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fake_streams.clocks import Clock, Launch, merge


class RaceError(AssertionError):
    """Two launches touch the same memory, one of them writes, and nothing orders them."""


@dataclass
class _Block:
    key: int
    alive: StorageWeakRef
    home: int
    """Stream on which it was allocated."""
    write: Launch | None = None
    reads: list[Launch] = field(default_factory=list)
    declared: set[int] = field(default_factory=set)
    """Streams that the allocator was told of."""
    is_host: bool = False
    """Page-locked memory of the host, which streams copy from and to."""


class Memory:
    """Every storage that an operator touched.

    Attributes:
        noted: Where to note races instead of raising them, for a test of what else finds them.
    """

    def __init__(self) -> None:
        self.noted: list[str] | None = None
        self._blocks: dict[int, _Block] = {}
        self._shared: dict[int, _Block] = {}
        """Blocks that a stream other than their home has used: of others nothing is left to wait for."""
        self._free: dict[int, list[Launch]] = {}

    def read(self, tensor: torch.Tensor, launch: Launch) -> None:
        if tensor.dim() == 0 and tensor.untyped_storage()._cdata not in self._blocks:
            return  # a number that no operator made is the host's, and a kernel has it as an argument
        block = self._block(tensor)
        if block.write is not None and not _ordered(launch, block.write):
            self._race(f"{launch} reads what {block.write} writes, and nothing orders them")
        block.reads.append(launch)
        self._note_use(block, launch)

    def write(self, tensor: torch.Tensor, launch: Launch) -> None:
        block = self._block(tensor)
        for earlier in [*block.reads, *([block.write] if block.write is not None else [])]:
            if not _ordered(launch, earlier):
                self._race(f"{launch} writes what {earlier} uses, and nothing orders them")
        block.write = launch
        block.reads.clear()
        self._note_use(block, launch)

    def allocate(self, tensors: list[torch.Tensor], home: int, *, private: bool) -> None:
        """Takes memory for tensors from a stream's own: it may be any that was let go there.

        Args:
            tensors: The tensors.
            home: The stream.
            private: Whether it is of a graph's pool, in which nothing lies that work outside of captures let go.
        """
        for tensor in tensors:
            block = self._block(tensor, home)
            if not private and (uses := self._free.pop(home, [])):
                block.reads += uses
                self._shared[block.key] = block

    def pin(self, tensor: torch.Tensor) -> None:
        """Makes a tensor one of the host's memory."""
        self._block(tensor).is_host = True

    def is_host(self, tensor: torch.Tensor) -> bool:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return block is not None and block.is_host

    def check_host(self, reads: list[torch.Tensor], writes: list[torch.Tensor], host: Clock) -> None:
        """Raises if the host touches its memory, which it does at once, before streams have done with it.

        torch on ``copy_(non_blocking=True)``: "the copy may occur asynchronously with respect to the host". What a
        stream copies from must stay as it is until the host knows that it has.
        """
        uses = [use for tensor in writes for use in self._block(tensor).reads]
        uses += [use for tensor in (*reads, *writes) if (use := self._block(tensor).write) is not None]
        for use in uses:
            if host.get(use.stream, 0) < use.number:
                raise RaceError(f"the host touches memory that {use} may still use")

    def declare(self, tensor: torch.Tensor, stream: int) -> None:
        self._block(tensor).declared.add(stream)

    def let_go(self, clocks: dict[int, Clock]) -> None:
        """Puts memory that nobody holds any more back to what its stream may be given.

        torch on ``record_stream``: "ensure the tensor memory is not reused for another tensor until all work queued on
        ``stream`` at the time of deallocation is complete"; without it, "memory will only be reused with the same
        creation stream", and that is all. What a declared stream was given waits for others, too.
        """
        expired = torch.UntypedStorage._expired  # as StorageWeakRef asks by a longer way, at each operator
        for key in [key for key, block in self._shared.items() if expired(block.alive.cdata)]:
            block = self._shared.pop(key)
            self._blocks.pop(key)
            if block.is_host:
                continue  # its allocator waits for the streams that copied
            known: Clock = {}
            for stream in block.declared:
                merge(known, clocks.get(stream, {}))
            self._free.setdefault(block.home, []).extend(
                use
                for use in [*block.reads, *([block.write] if block.write is not None else [])]
                if use.stream != block.home and known.get(use.stream, 0) < use.number
            )

    def _note_use(self, block: _Block, launch: Launch) -> None:
        if launch.stream != block.home:
            self._shared[block.key] = block

    def _race(self, what: str) -> None:
        if self.noted is None:
            raise RaceError(what)
        self.noted.append(what)

    def _block(self, tensor: torch.Tensor, home: int = 0) -> _Block:
        """Returns what is known of a tensor's memory; what no operator made was allocated on the user's stream."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None or block.alive.expired():
            block = self._blocks[key] = _Block(key, StorageWeakRef(storage), home)
        return block


def _ordered(later: Launch, earlier: Launch) -> bool:
    return later.stream == earlier.stream or later.is_after(earlier)
