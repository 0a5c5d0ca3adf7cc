"""The ranks that train a day together: one alone, several that Mosaic has divided the model over, or exact copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree


class Crew:
    """One process that trains alone, or one of several whose gradients the handle reduces.

    Args:
        device: Where this rank trains.
        rank: This one.
        size: How many there are.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self._group: Any = None

    def moved(self, batch: Any) -> Any:
        """Returns a batch with its tensors where this rank trains."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    @contextmanager
    def adding(self, micro_batch: int) -> Iterator[None]:
        """Surrounds the forward and backward of a micro-batch."""
        yield

    def finish_gradients(self) -> None:
        """Called once all micro-batches of a step have been through their backward."""

    def highest(self, flags: Sequence[float]) -> tuple[float, ...]:
        """Returns for each flag the highest of all ranks."""
        if self.size == 1:
            return tuple(flags)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        found = torch.tensor([float(flag) for flag in flags], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(found.tolist())
