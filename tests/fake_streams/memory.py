"""Who wrote and read which memory last, and whether each access was ordered after the ones it depends on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fake_streams.clocks import Clock, Launch, merge


class RaceError(AssertionError):
    """Two launches touch the same memory, one of them writes, and nothing orders them."""


@dataclass
class _Block:
    alive: StorageWeakRef
    home: int
    """Stream on which it was allocated."""
    write: Launch | None = None
    reads: list[Launch] = field(default_factory=list)
    declared: set[int] = field(default_factory=set)
    """Streams that the allocator was told of."""


class Memory:
    """Every storage that an operator touched."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    def read(self, tensor: torch.Tensor, launch: Launch) -> None:
        block = self._block(tensor, launch.stream)
        if block.write is not None and not _ordered(launch, block.write):
            raise RaceError(f"{launch} reads what {block.write} writes, and nothing orders them")
        block.reads.append(launch)

    def write(self, tensor: torch.Tensor, launch: Launch) -> None:
        block = self._block(tensor, launch.stream)
        for earlier in [*block.reads, *([block.write] if block.write is not None else [])]:
            if not _ordered(launch, earlier):
                raise RaceError(f"{launch} writes what {earlier} uses, and nothing orders them")
        block.write = launch
        block.reads.clear()

    def declare(self, tensor: torch.Tensor, stream: int) -> None:
        self._block(tensor, stream).declared.add(stream)

    def check_freed(self, clocks: dict[int, dict[int, int]]) -> None:
        """Raises if freed memory may be given out again while another stream still uses it.

        The allocator waits for what declared streams were given by then, and so for what these wait for.
        """
        for key in [key for key, block in self._blocks.items() if block.alive.expired()]:
            block = self._blocks.pop(key)
            known: Clock = {}
            for stream in (block.home, *block.declared):
                merge(known, clocks.get(stream, {}))
            for use in [*block.reads, *([block.write] if block.write is not None else [])]:
                told = use.stream == block.home or use.stream in block.declared
                if not told and known.get(use.stream, 0) < use.number:
                    raise RaceError(f"memory of stream {block.home} was let go while {use} may still use it")

    def _block(self, tensor: torch.Tensor, stream: int) -> _Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None or block.alive.expired():
            block = self._blocks[key] = _Block(StorageWeakRef(storage), stream)
        return block


def _ordered(later: Launch, earlier: Launch) -> bool:
    return later.stream == earlier.stream or later.is_after(earlier)
