"""Gradient reduction over the ranks that hold a parameter: in buckets, while the rest of the backward runs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.cost.communication import BUCKET_BYTES
from mosaic.errors import UnsupportedModelError
from mosaic.ranks.world.progress import Waiting

_LARGE = 1 << 16
"""Elements of a gradient that is copied to its bucket as it comes, while it is in the cache."""


class SumPlace:
    """The place of gradient sums: the calling thread's; on streams a lane's."""

    def follow(self) -> None:
        """Orders the place behind the work that the calling thread has launched."""

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a block whose work is done at the place."""
        return nullcontext()

    def gave(self, grad: torch.Tensor) -> None:
        """Notes that a gradient which was made at the place is used elsewhere."""


class _Bucket:
    """Gradients of one type in one piece of memory, which is kept from step to step, with flags behind them."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_ranks: int) -> None:
        self.parameters = parameters
        self.num_flags = 0
        self._num_ranks = num_ranks
        self._taken: set[int] = set()
        self._flat: torch.Tensor | None = None
        self._places: dict[int, torch.Tensor] = {}

    def take(self, parameter: torch.Tensor) -> None:
        """Copies a large gradient, divided by the number of ranks, to its place; small ones wait for the others."""
        assert parameter.grad is not None
        self._memory()
        torch.div(parameter.grad.detach(), self._num_ranks, out=self._places[id(parameter)])
        self._taken.add(id(parameter))

    def gather(self) -> torch.Tensor:
        """Returns the memory with all gradients; one that is not there counts as zeros."""
        memory, places, grads = self._memory(), [], []
        for parameter in self.parameters:
            if parameter.grad is None:
                self._places[id(parameter)].zero_()
            elif id(parameter) not in self._taken:
                places.append(self._places[id(parameter)])
                grads.append(parameter.grad.detach())
        if grads:
            torch._foreach_copy_(places, torch._foreach_div(grads, self._num_ranks))
        self._taken.clear()
        return memory

    def hand_out(self, there: Container[int]) -> list[torch.Tensor]:
        """Copies the sums into the gradients; returns those that were not there before."""
        new_grads, places, grads = [], [], []
        for parameter in self.parameters:
            if parameter.grad is not None:
                places.append(self._places[id(parameter)])
                grads.append(parameter.grad.detach())
            elif id(parameter) in there:
                parameter.grad = self._places[id(parameter)].clone()
                new_grads.append(parameter.grad)
        if grads:
            torch._foreach_copy_(grads, places)
        return new_grads

    def _memory(self) -> torch.Tensor:
        if self._flat is None or self._flat.dtype != self.parameters[0].dtype:
            sizes = [parameter.numel() for parameter in self.parameters]
            self._flat = self.parameters[0].detach().new_empty(sum(sizes) + self.num_flags)
            pieces = self._flat.split([*sizes, self.num_flags])
            self._places = {id(p): piece.view(p.shape) for p, piece in zip(self.parameters, pieces, strict=False)}
        return self._flat


class GradientReducer:
    """Makes the gradients of some parameters the mean over a group's ranks.

    A bucket starts as soon as the gradients of all its parameters are there, behind the buckets before it, so all ranks
    start them in one order: the reverse of the parameters'. The last bucket also carries which gradients are there.
    Gradients of earlier backwards are the same on all ranks, and so is their mean. As in DistributedDataParallel,
    gradients are divided before they are summed, and copied to and from a bucket's memory.

    Without ``overlaps`` all buckets start at the backward's end, which is right where lanes have gradients until then.
    ``waiting`` records that a thread waits for other ranks.
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
    ) -> None:
        self.group = group
        self._place = place or SumPlace()
        self._waiting = waiting
        self._size = dist.get_world_size(group)
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = _buckets_of(self.parameters, bucket_bytes, self._size) if self._size > 1 else []
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._missing: list[set[int]] = []
        self._next = 0
        self._running: list[tuple[_Bucket, torch.Tensor, Any]] = []
        self._begin()
        self._overlaps = overlaps and bool(self._buckets)
        self._on_arrival: Callable[[], None] = lambda: None
        hooked = self.parameters if self._overlaps else []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in hooked]

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that one reduction takes; 0 on one rank."""
        return sum(parameter.nbytes for parameter in self.parameters) if self._size > 1 else 0

    @property
    def is_running(self) -> bool:
        """True if a reduction was started and not ended."""
        return bool(self._running)

    def watch(self, on_arrival: Callable[[], None]) -> None:
        """Calls a function whenever a gradient of a parameter has been added up."""
        self._on_arrival = on_arrival
        if not self._overlaps:
            self._hooks += [p.register_post_accumulate_grad_hook(lambda _: on_arrival()) for p in self.parameters]

    def start_rest(self) -> None:
        """Starts all buckets that have not been started, without waiting; ``finish`` has to follow."""
        if self._next < len(self._buckets):
            self._place.follow()
        while self._next < len(self._buckets):
            self._start_next()

    def finish(self) -> None:
        """Reduces the rest, and waits; every rank of the group calls it once after each backward.

        A parameter has a gradient afterwards if any rank had one; ranks without count as zeros.
        """
        self.start_rest()
        late = []
        for bucket, _, work in self._running:
            with self._place.entered():
                with self._waiting("reduce"):
                    work.wait()
                if any(parameter.grad is None for parameter in bucket.parameters):
                    late.append(bucket)  # the flags of the last bucket say whether to make one
                else:
                    bucket.hand_out(self._bucket_of)
        if late:  # reading flags makes the host wait for a GPU
            flags = self._running[-1][1][-len(self.parameters) :].tolist()
            there = {id(parameter) for parameter, flag in zip(self.parameters, flags, strict=True) if flag}
            with self._place.entered():
                for bucket in late:
                    for grad in bucket.hand_out(there):
                        self._place.gave(grad)
        self._begin()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._missing = [{id(p) for p in bucket.parameters} for bucket in self._buckets]
        self._next = 0
        self._running = []

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._on_arrival()
        self._place.follow()
        index = self._bucket_of[id(parameter)]
        self._missing[index].discard(id(parameter))
        # Autograd calls hooks for a gradient that is undefined, too.
        if parameter.numel() >= _LARGE and parameter.grad is not None:
            with self._place.entered():
                self._buckets[index].take(parameter)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        with self._place.entered():
            total = bucket.gather()
            if bucket.num_flags:
                flags = total[-len(self.parameters) :].fill_(1)
                for place, parameter in enumerate(self.parameters):
                    if parameter.grad is None:
                        flags[place] = 0
            self._running.append((bucket, total, dist.all_reduce(total, group=self.group, async_op=True)))
        self._next += 1


def _buckets_of(trained: Sequence[nn.Parameter], bucket_bytes: int, num_ranks: int) -> list[_Bucket]:
    """Returns buckets in the order in which they start; the last one has room for a flag of each parameter."""
    buckets: list[_Bucket] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(trained):
        others = filling.setdefault(parameter.dtype, [])
        if others and sum(p.nbytes for p in others) + parameter.nbytes > bucket_bytes:
            buckets.append(_Bucket(others, num_ranks))
            others = filling[parameter.dtype] = []
        others.append(parameter)
    buckets += [_Bucket(parameters, num_ranks) for parameters in filling.values()]
    if buckets:
        buckets[-1].num_flags = len(trained)
    return buckets


def refuse_sparse(model: nn.Module) -> None:
    """Raises UnsupportedModelError that names a table whose gradients are sparse."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise UnsupportedModelError(
                f"{name} has sparse gradients, which several ranks do not sum; make it with sparse=False, and use an "
                "optimizer of dense gradients, such as SGD or AdamW"
            )
