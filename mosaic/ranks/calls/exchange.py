"""Moving rows between ranks, differentiably: forward one way, gradients back the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mosaic.ranks.calls import steps
from mosaic.ranks.calls.steps import Step
from mosaic.ranks.meeting.groups import carrier_of, wait_for
from mosaic.ranks.meeting.progress import Waiting, unwatched
from mosaic.ranks.watching.traffic import Phase, Traffic


class Way(Protocol):
    """From where to where rows go: a ``RowRouting`` or a ``Transfer``, there or back."""

    @property
    def is_local(self) -> bool:
        """Whether every row stays where it is."""

    @property
    def back(self) -> Way:
        """The way back."""

    def sends(self, rank: int) -> tuple[int, ...]:
        """Rows that a rank gives to each rank."""

    def receives(self, rank: int) -> tuple[int, ...]:
        """Rows that a rank gets from each rank."""

    def send_order(self, rank: int) -> tuple[int, ...] | None:
        """In which order a rank's rows are sent; None for as they lie."""

    def receive_order(self, rank: int) -> tuple[int, ...] | None:
        """In which order rows are taken that came; None for as they came."""


class Exchange:
    """The routing of one call's rows over one communicator.

    Args:
        group: A group of all ranks that belongs to the module alone, so that its messages keep their order.
        name: The module, and
        traffic: where to count what is sent for it.
        note: Told of each step that sends.
        waiting: Notes that a thread waits for other ranks.
        control: All ranks, for tensors that ``group`` cannot carry; none by default.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str = "",
        *,
        traffic: Traffic,
        note: Callable[[Step], object] = lambda step: None,
        waiting: Waiting = unwatched,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self._control = group if control is None else control
        self.rank = dist.get_rank(group)
        self._count = partial(traffic.add, name)
        self._note = note
        self._waiting = waiting

    def begin(self, step: Step, ways: Iterable[Way]) -> None:
        """Notes that what follows is a step, unless nothing travels."""
        if not all(way.is_local for way in ways):
            self._note(step)

    def move(self, tensor: torch.Tensor, way: Way, phase: Phase = "forward") -> torch.Tensor:
        """Returns the rows that this rank gets for those that it has; none, where it is to have none."""
        if way.is_local:
            return tensor
        sends, receives = way.sends(self.rank), way.receives(self.rank)
        made = tensor.new_empty((sum(receives), *tensor.shape[1:]))
        given = _in_order(tensor.contiguous(), way.send_order(self.rank))
        with self._waiting(phase):
            group = carrier_of(given, self.group, self._control)
            wait_for(dist.all_to_all_single(made, given, list(receives), list(sends), group=group, async_op=True))
        if num_rows := sum(sends) - sends[self.rank]:
            self._count(phase, num_rows * math.prod(tensor.shape[1:]) * tensor.element_size())
        return _in_order(made, way.receive_order(self.rank))


class ToMembers(torch.autograd.Function):
    """Rows of several tensors to the members, each its way; their gradients, divided by ``scale``, back."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, scale: float, ways: Sequence[Way], *tensors: torch.Tensor) -> Any:
        """Moves the rows to the members."""
        ctx.exchange, ctx.scale, ctx.ways = exchange, scale, ways
        return tuple(_fresh(tensor, exchange.move(tensor, way)) for tensor, way in zip(tensors, ways, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Moves the gradients back to where the rows came from."""
        ctx.exchange.begin(steps.TO_HOLDERS, ctx.ways)
        moved = (ctx.exchange.move(grad, way.back, "backward") for grad, way in zip(grads, ctx.ways, strict=True))
        return None, None, None, *(scaled(grad, 1 / ctx.scale) for grad in moved)


class ToHolders(torch.autograd.Function):
    """Results to the holders; their gradients, times ``scale``, back to the members.

    A result without a way stays where it is, for another module to fetch, and its gradient comes there. Besides the
    results it returns an empty tensor that nobody uses: a way into the backward for a rank whose loss is made of
    something else.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, scale: float, ways: Sequence[Way | None], *tensors: torch.Tensor) -> Any:
        """Moves the results to the holders."""
        ctx.exchange, ctx.scale, ctx.ways = exchange, scale, ways
        moved = (
            _fresh(tensor, tensor if way is None else exchange.move(tensor, way))
            for tensor, way in zip(tensors, ways, strict=True)
        )
        return *moved, tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Moves their gradients to the members."""
        ctx.exchange.begin(steps.TO_MEMBERS, [way for way in ctx.ways if way is not None])
        moved = (
            grad if way is None else ctx.exchange.move(grad, way.back, "backward")
            for grad, way in zip(grads[:-1], ctx.ways, strict=True)
        )
        return None, None, None, *(scaled(grad, ctx.scale) for grad in moved)


class Shared(torch.autograd.Function):
    """An argument that is no part of the batch and the same on all ranks; its gradients are divided by ``scale``."""

    @staticmethod
    def forward(ctx: Any, scale: float, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the argument."""
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Divides its gradient."""
        return None, scaled(grads[0], 1 / ctx.scale)


def scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a gradient times a factor; itself, bit for bit, where that is 1."""
    return grad if factor == 1 else grad * factor


def _fresh(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return made.detach() if made is given else made  # a view could not be changed in place


def _in_order(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    return tensor if order is None else tensor[torch.tensor(order, device=tensor.device)]
