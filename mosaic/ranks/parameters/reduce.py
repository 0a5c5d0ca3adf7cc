"""Gradients summed over the ranks that hold a parameter: in buckets, while the rest of the backward runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.cost.communication import BUCKET_BYTES
from mosaic.ranks.parameters.buckets import Bucket, buckets_of
from mosaic.ranks.world.progress import Waiting


class SumPlace:
    """Where gradients are summed up: here, wherever the calling thread is; on streams a lane's."""

    def follow(self) -> None:
        """Orders the place behind what the calling thread does now."""

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a block whose work is done at the place."""
        return nullcontext()

    def gave(self, grad: torch.Tensor) -> None:
        """Told of a gradient that was made at the place and is used elsewhere."""


class GradientReducer:
    """Makes the gradients of some parameters the mean over a group's ranks.

    A bucket starts as soon as the gradients of all its parameters are there, behind the buckets before it, so that all
    ranks start them in one order. The last bucket, which starts last, also says which gradients are there. What was in
    ``grad`` before is the same on all ranks, and so is its mean.

    Args:
        parameters: Those that train, in the order of the module; reduced in the reverse order.
        group: The ranks that hold them; a communicator of its own.
        bucket_bytes: Bytes of a bucket.
        overlaps: Whether buckets start while the backward runs; otherwise they start at its end, which is right where
            others have the gradients until then, as lanes have those of operations between modules.
        waiting: Notes that a thread waits for other ranks.
        place: Where sums are made; on streams, whose they are.
        sparse: Ids of parameters whose gradients are sparse (``sparse_in``); each is a bucket of its own.

    Attributes:
        parameters: Those that train.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        overlaps: bool = True,
        waiting: Waiting,
        place: SumPlace | None = None,
        sparse: frozenset[int] = frozenset(),
    ) -> None:
        self._group = group
        self._place = place or SumPlace()
        self._waiting = waiting
        self._size = dist.get_world_size(group)
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = buckets_of(self.parameters, bucket_bytes, sparse, self._size) if self._size > 1 else []
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._missing: list[set[int]] = []
        self._next = 0
        self._running: list[tuple[Bucket, torch.Tensor, Any]] = []
        self._begin()
        hooked = self.parameters if overlaps and self._buckets else []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in hooked]

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that one reduction takes; 0 where there is nobody to reduce with."""
        return sum(parameter.nbytes for parameter in self.parameters) if self._size > 1 else 0

    @property
    def is_running(self) -> bool:
        """Whether a reduction was started and not ended."""
        return bool(self._running)

    def start_rest(self) -> None:
        """Starts all buckets that have not been started, without waiting; ``finish`` has to follow."""
        if self._next < len(self._buckets):
            self._place.follow()
        while self._next < len(self._buckets):
            self._start_next()

    def finish(self) -> None:
        """Reduces what is left, and waits; to be called once on every rank of the group after each backward.

        A parameter without a gradient on this rank counts as one of zeros, and has a gradient afterwards if any rank
        had one.
        """
        self.start_rest()
        late = []
        for bucket, total, work in self._running:
            with self._place.entered():
                with self._waiting("reduce"):
                    work.wait()
                if any(parameter.grad is None for parameter in bucket.parameters):
                    late.append((bucket, total))  # whether to give it one is said at the end
                else:
                    bucket.hand_out(total, self._bucket_of)
        if late:  # looked at only where something is missing: on a GPU it makes the host wait
            flags = self._running[-1][1][-len(self.parameters) :].tolist()
            there = {id(parameter) for parameter, flag in zip(self.parameters, flags, strict=True) if flag}
            with self._place.entered():
                for bucket, total in late:
                    for grad in bucket.hand_out(total, there):
                        self._place.gave(grad)
        self._begin()

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._missing = [{id(p) for p in bucket.parameters} for bucket in self._buckets]
        self._next = 0
        self._running = []

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._place.follow()
        index = self._bucket_of[id(parameter)]
        self._missing[index].discard(id(parameter))
        if parameter.grad is not None:  # autograd calls hooks for a gradient that is undefined, too
            with self._place.entered():
                self._buckets[index].take(parameter)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        with self._place.entered():
            total = bucket.gather()
            if self._next == len(self._buckets) - 1:
                flags = total[-len(self.parameters) :].fill_(1)
                for place, parameter in enumerate(self.parameters):
                    if parameter.grad is None:
                        flags[place] = 0
            self._running.append((bucket, total, dist.all_reduce(total, group=self._group, async_op=True)))
        self._next += 1


def sparse_in(model: nn.Module) -> frozenset[int]:
    """Returns the ids of the parameters that get sparse gradients: tables that are looked up with ``sparse=True``."""
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return frozenset(id(table.weight) for table in tables if table.sparse)
