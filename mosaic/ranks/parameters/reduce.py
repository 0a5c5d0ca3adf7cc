"""Gradients summed over the ranks that hold a parameter: in buckets, while the rest of the backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.cost.communication.traffic import BUCKET_BYTES
from mosaic.ranks.meeting.progress import Waiting


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
    ranks start them in one order. What was in ``grad`` before is the same on all ranks, and so is its mean.

    Args:
        parameters: Those that train, in the order of the module; reduced in the reverse order.
        group: The ranks that hold them; a communicator of its own.
        bucket_bytes: Bytes of a bucket.
        overlaps: Whether buckets start while the backward runs; otherwise they start at its end, which is right where
            others have the gradients until then, as lanes have those of operations between modules.
        waiting: Notes that a thread waits for other ranks.
        place: Where sums are made; on streams, whose they are.
        sparse: Ids of parameters whose gradients are sparse (``sparse_in``); each is a bucket of its own.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        overlaps: bool = True,
        waiting: Waiting,
        place: SumPlace | None = None,
        sparse: frozenset[int] = frozenset(),
    ) -> None:
        self._group = group
        self._sparse = sparse
        self._place = place or SumPlace()
        self._waiting = waiting
        self._size = dist.get_world_size(group)
        self._buckets = _buckets(list(parameters), bucket_bytes, sparse)
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[set[int]] = []
        self._next = 0
        self._running: list[tuple[int, torch.Tensor, Any]] = []
        self._begin()
        hooked = [p for bucket in self._buckets for p in bucket] if overlaps else []
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in hooked]

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that one reduction takes; 0 where there is nobody to reduce with."""
        return sum(p.nbytes for bucket in self._buckets for p in bucket) if self._size > 1 else 0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What it reduces."""
        return [parameter for bucket in self._buckets for parameter in bucket]

    @property
    def is_running(self) -> bool:
        """Whether a reduction was started and not ended."""
        return bool(self._running)

    def start_rest(self) -> None:
        """Starts all buckets that have not been started, without waiting; ``finish`` has to follow."""
        if self._next < len(self._buckets):
            self._place.follow()
        while self._next < len(self._buckets):
            self._start(self._next)

    def finish(self) -> None:
        """Reduces what is left, and waits; to be called once on every rank of the group after each backward.

        A parameter without a gradient on this rank counts as one of zeros, and has a gradient afterwards if any rank
        had one.
        """
        self.start_rest()
        for index, flat, work in self._running:
            with self._place.entered():
                with self._waiting("reduce"):
                    work.wait()
                self._hand_out(index, flat)
        self._begin()

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        self._next = 0
        self._running = []

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        self._place.follow()
        self._missing[self._bucket_of[id(parameter)]].discard(id(parameter))
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start(self._next)

    def _start(self, index: int) -> None:
        with self._place.entered():
            self._start_here(index)

    def _start_here(self, index: int) -> None:
        bucket = self._buckets[index]
        if id(bucket[0]) in self._sparse:
            flat = _sparse_gradient(bucket[0])
            self._begun(index, flat)
            return
        # The last numbers say which gradients are there at all.
        there = bucket[0].new_ones(len(bucket))
        for place, parameter in enumerate(bucket):
            if parameter.grad is None:
                there[place] = 0
        grads = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in bucket]
        self._begun(index, torch.cat([*grads, there]))

    def _begun(self, index: int, flat: torch.Tensor) -> None:
        self._running.append((index, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        self._next = index + 1

    def _hand_out(self, index: int, flat: torch.Tensor) -> None:
        bucket = self._buckets[index]
        if flat.is_sparse:
            bucket[0].grad = flat.div_(self._size) if flat._nnz() or bucket[0].grad is not None else None
            return
        # Looked at only where something is missing: on a GPU it makes the host wait.
        is_whole = all(parameter.grad is not None for parameter in bucket)
        there = [1.0] * len(bucket) if is_whole else flat[-len(bucket) :].tolist()
        start = 0
        for parameter, count in zip(bucket, there, strict=True):
            mean = flat[start : start + parameter.numel()].view_as(parameter).div_(self._size)
            start += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif count:
                parameter.grad = mean.clone()
                self._place.gave(parameter.grad)


def sparse_in(model: nn.Module) -> frozenset[int]:
    """Returns the ids of the parameters that get sparse gradients: tables that are looked up with ``sparse=True``."""
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return frozenset(id(table.weight) for table in tables if table.sparse)


def _sparse_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns a parameter's gradient, or one without elements."""
    if parameter.grad is not None:
        return parameter.grad.coalesce().clone()
    return torch.zeros_like(parameter, layout=torch.sparse_coo, requires_grad=False).coalesce()


def _buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, sparse: frozenset[int]
) -> list[list[torch.nn.Parameter]]:
    """Groups parameters of one dtype, the last ones first, since their gradients come first."""
    buckets: list[list[torch.nn.Parameter]] = []
    for parameter in reversed(parameters):
        if not parameter.requires_grad:
            continue
        last = buckets[-1] if buckets else None
        if (
            last is None
            or last[0].dtype != parameter.dtype
            or not sparse.isdisjoint((id(last[0]), id(parameter)))
            or sum(p.nbytes for p in last) + parameter.nbytes > bucket_bytes
        ):
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets
