"""How keys and values travel: all of them to all ranks, or to each rank the blocks that it reads.

A rank's blocks are one tensor ``(blocks, batch, heads, block, width)``, keys and values side by side in its last
dimension, so that a block is one stretch of memory and both ways of travelling cut along the first dimension.
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

# The names of torch 2.13, and before it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """Something on its way."""

    work: Any
    """What torch.distributed returned; None where nothing has to travel."""
    finish: Callable[[], torch.Tensor]
    """Makes of what arrived what was asked for; holds what is read until then."""

    def wait(self) -> torch.Tensor:
        """Waits for it and returns it."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Exchange(Protocol):
    """A way in which keys and values travel."""

    column_of: npt.NDArray[np.int32]
    """Place of each block of the sequence in what is fetched; -1 for one that is not among them."""
    num_blocks: int
    """Blocks that are fetched, empty ones too."""

    def fetch(self, own: torch.Tensor) -> Pending:
        """Starts to fetch the blocks that this rank reads; own ones among them."""

    def give_back(self, gradient: torch.Tensor) -> Pending:
        """Starts to give the gradients of fetched blocks back; what arrives is the sum of those of own blocks."""


class Alone:
    """One rank: nothing travels."""

    def __init__(self, plan: ContextPlan) -> None:
        self.column_of = plan.layout.column_of()
        self.num_blocks = plan.distribution.slots

    def fetch(self, own: torch.Tensor) -> Pending:
        """Returns own blocks."""
        return Pending(None, lambda: own)

    def give_back(self, gradient: torch.Tensor) -> Pending:
        """Returns the gradients."""
        return Pending(None, lambda: gradient)


class GatherAll:
    """Every rank receives the blocks of all, rank after rank; gradients are summed on the way back."""

    def __init__(self, plan: ContextPlan, group: Any) -> None:
        self.column_of = plan.layout.column_of()
        self.num_blocks = plan.ranks * plan.distribution.slots
        self._group = group

    def fetch(self, own: torch.Tensor) -> Pending:
        """Gathers the blocks of all ranks."""
        gathered = own.new_empty(self.num_blocks, *own.shape[1:])
        work = all_gather(gathered, own, group=self._group, async_op=True)
        return Pending(work, lambda: _first(gathered, own))

    def give_back(self, gradient: torch.Tensor) -> Pending:
        """Sums each block's gradients at its owner."""
        own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(self._group), *gradient.shape[1:])
        work = reduce_scatter(own, gradient, group=self._group, async_op=True)
        return Pending(work, lambda: _first(own, gradient))


class FetchNeeded:
    """Every rank receives only the blocks that it reads, rank after rank; their gradients go the same way back."""

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
        """Sends each rank what it reads."""
        asked = own.index_select(0, self._sent)
        arrived = own.new_empty(self.num_blocks, *own.shape[1:])
        work = dist.all_to_all_single(arrived, asked, self._in, self._out, group=self._group, async_op=True)
        return Pending(work, lambda: _first(arrived, asked))

    def give_back(self, gradient: torch.Tensor) -> Pending:
        """Sends gradients to the blocks' owners, who sum them in the order of ranks."""
        arrived = gradient.new_empty(sum(self._out), *gradient.shape[1:])
        work = dist.all_to_all_single(arrived, gradient, self._out, self._in, group=self._group, async_op=True)
        return Pending(work, lambda: self._summed(_first(arrived, gradient)))

    def _summed(self, arrived: torch.Tensor) -> torch.Tensor:
        own = arrived.new_zeros(self._slots, *arrived.shape[1:])
        for places, part in zip(self._sent.split(self._out), arrived.split(self._out), strict=True):
            own[places] += part  # each place once in a part, so that the sum is the same in every run
        return own


def _first(wanted: torch.Tensor, _read: torch.Tensor) -> torch.Tensor:
    """Returns what was asked for; who calls it has held what is read meanwhile."""
    return wanted


EXCHANGES = {
    "gather": "all keys and values to all ranks: fewest calls, most bytes",
    "needed": "to each rank the blocks that it reads: fewer bytes where documents are packed and chunks coarse",
}
"""Names, with a phrase each."""


def make_exchange(name: str, plan: ContextPlan, group: Any, rank: int, device: torch.device) -> Exchange:
    """Returns a way for keys and values to travel by name.

    Raises:
        ValueError: There is none of that name; lists all.
    """
    if name not in EXCHANGES:
        raise ValueError(
            f"exchange={name!r} is no way for keys and values to travel; use one of {', '.join(EXCHANGES)}"
        )
    if plan.ranks == 1:
        return Alone(plan)
    return GatherAll(plan, group) if name == "gather" else FetchNeeded(plan, group, rank, device)
