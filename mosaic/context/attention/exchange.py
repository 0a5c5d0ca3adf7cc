"""Exchange of keys and values: all of them to all ranks, or to each rank the blocks that it reads.

A rank's blocks are one tensor ``(blocks, batch, heads, block, width)``, keys and values side by side in its last
dimension: a block is contiguous in memory, and both exchanges cut along the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mosaic.context.plan import ContextPlan
from mosaic.errors import unknown

# The names of torch 2.13, and before it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """A pending exchange."""

    work: Any
    """Work of torch.distributed; None without communication."""
    finish: Callable[[], torch.Tensor]
    """Makes the result; holds the tensors that the exchange reads."""

    def wait(self) -> torch.Tensor:
        """Waits for the result and returns it."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Exchange(Protocol):
    """An exchange of keys and values."""

    column_of: npt.NDArray[np.int32]
    """Place of each block of the sequence among the fetched ones; -1 for others."""
    num_blocks: int
    """Fetched blocks, including empty ones."""

    def fetch(self, own: torch.Tensor) -> Pending:
        """Starts to fetch the blocks that this rank reads, including its own."""

    def return_gradient(self, gradient: torch.Tensor) -> Pending:
        """Starts to return the gradients of fetched blocks; the result is the sum for own blocks."""


class Alone:
    """One rank, without communication."""

    def __init__(self, plan: ContextPlan) -> None:
        self.column_of = plan.layout.column_of()
        self.num_blocks = plan.distribution.slots

    def fetch(self, own: torch.Tensor) -> Pending:
        """Returns own blocks."""
        return Pending(None, lambda: own)

    def return_gradient(self, gradient: torch.Tensor) -> Pending:
        """Returns the gradients."""
        return Pending(None, lambda: gradient)


class GatherAll:
    """All-gathers the blocks of all ranks, and reduce-scatters the gradients."""

    def __init__(self, plan: ContextPlan, group: Any) -> None:
        self.column_of = plan.layout.column_of()
        self.num_blocks = plan.ranks * plan.distribution.slots
        self._group = group

    def fetch(self, own: torch.Tensor) -> Pending:
        """Gathers the blocks of all ranks."""
        gathered = own.new_empty(self.num_blocks, *own.shape[1:])
        work = all_gather(gathered, own, group=self._group, async_op=True)
        return Pending(work, lambda: _first(gathered, own))

    def return_gradient(self, gradient: torch.Tensor) -> Pending:
        """Sums each block's gradients at its owner."""
        own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(self._group), *gradient.shape[1:])
        work = reduce_scatter(own, gradient, group=self._group, async_op=True)
        return Pending(work, lambda: _first(own, gradient))


class FetchNeeded:
    """Sends each rank only the blocks that it reads, and their gradients back to the owners."""

    def __init__(self, plan: ContextPlan, group: Any, rank: int, device: torch.device) -> None:
        needed, rank_of = plan.needed(), plan.distribution.rank_of
        columns = plan.layout.column_of() - rank * plan.distribution.slots
        sent = [np.flatnonzero(needed[other] & (rank_of == rank)) for other in range(plan.ranks)]
        received = [np.flatnonzero(needed[rank] & (rank_of == other)) for other in range(plan.ranks)]
        arriving = np.concatenate(received)
        self.column_of = np.full(len(rank_of), -1, np.int32)
        self.column_of[arriving] = np.arange(len(arriving), dtype=np.int32)
        self.num_blocks = len(arriving)
        self._slots = plan.distribution.slots
        self._in, self._out = [len(blocks) for blocks in received], [len(blocks) for blocks in sent]
        self._sent = torch.from_numpy(columns[np.concatenate(sent)].astype(np.int64)).to(device)
        self._group = group

    def fetch(self, own: torch.Tensor) -> Pending:
        """Sends each rank the blocks that it reads."""
        requested = own.index_select(0, self._sent)
        arrived = own.new_empty(self.num_blocks, *own.shape[1:])
        work = dist.all_to_all_single(arrived, requested, self._in, self._out, group=self._group, async_op=True)
        return Pending(work, lambda: _first(arrived, requested))

    def return_gradient(self, gradient: torch.Tensor) -> Pending:
        """Sends gradients to the blocks' owners, which sum them in the order of ranks."""
        arrived = gradient.new_empty(sum(self._out), *gradient.shape[1:])
        work = dist.all_to_all_single(arrived, gradient, self._out, self._in, group=self._group, async_op=True)
        return Pending(work, lambda: self._summed(_first(arrived, gradient)))

    def _summed(self, arrived: torch.Tensor) -> torch.Tensor:
        own = arrived.new_zeros(self._slots, *arrived.shape[1:])
        for places, part in zip(self._sent.split(self._out), arrived.split(self._out), strict=True):
            own[places] += part  # each place once in a part: the sum is the same in every run
        return own


def _first(result: torch.Tensor, _read: torch.Tensor) -> torch.Tensor:
    """Returns the result; the caller's closure has held the tensor that the exchange reads."""
    return result


EXCHANGES = {
    "gather": "all keys and values to all ranks: fewest calls, most bytes",
    "needed": "to each rank the blocks that it reads: fewer bytes for packed documents and coarse chunks",
}
"""Descriptions by name."""


def make_exchange(name: str, plan: ContextPlan, group: Any, rank: int, device: torch.device) -> Exchange:
    """Returns an exchange by name.

    Raises:
        ValueError: The name is unknown; lists all.
    """
    if name not in EXCHANGES:
        raise ValueError(unknown("exchange", name, EXCHANGES))
    if plan.ranks == 1:
        return Alone(plan)
    return GatherAll(plan, group) if name == "gather" else FetchNeeded(plan, group, rank, device)
