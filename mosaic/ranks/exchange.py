"""Moving rows between ranks, differentiably: forward one way, gradients back the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mosaic.ranks import steps
from mosaic.ranks.progress import Waiting, unwatched
from mosaic.ranks.rows import RowRouting
from mosaic.ranks.steps import Step
from mosaic.ranks.traffic import Phase, Traffic


class Exchange:
    """The routing of one call's rows over one communicator.

    Args:
        routing: Which rows go where.
        group: A group of all ranks that belongs to the module alone, so that its messages keep their order.
        name: The module, and
        traffic: where to count what is sent for it.
        note: Told of each step that sends.
        waiting: Notes that a thread waits for other ranks.
    """

    def __init__(
        self,
        routing: RowRouting,
        group: dist.ProcessGroup,
        name: str = "",
        *,
        traffic: Traffic,
        note: Callable[[Step], object] = lambda step: None,
        waiting: Waiting = unwatched,
    ) -> None:
        self.routing = routing
        self.group = group
        self.rank = dist.get_rank(group)
        self._count = partial(traffic.add, name)
        self._note = note
        self._waiting = waiting

    def begin(self, step: Step) -> None:
        """Notes that what follows is a step, unless nothing travels."""
        if not self.routing.is_local:
            self._note(step)

    def to_members(self, tensor: torch.Tensor, phase: Phase = "forward") -> torch.Tensor:
        """Returns this rank's part of the rows: none, on a rank that does not run the module."""
        return self._all_to_all(tensor, self.routing.sends(self.rank), self.routing.receives(self.rank), phase)

    def to_holders(self, tensor: torch.Tensor, phase: Phase = "forward") -> torch.Tensor:
        """Returns the rows that this rank holds, of what the members made of them."""
        return self._all_to_all(tensor, self.routing.receives(self.rank), self.routing.sends(self.rank), phase)

    def _all_to_all(
        self, tensor: torch.Tensor, sends: tuple[int, ...], receives: tuple[int, ...], phase: Phase
    ) -> torch.Tensor:
        if self.routing.is_local:
            return tensor
        made = tensor.new_empty((sum(receives), *tensor.shape[1:]))
        given = tensor.contiguous()
        with self._waiting(phase):
            dist.all_to_all_single(made, given, list(receives), list(sends), group=self.group)
        if num_rows := sum(sends) - sends[self.rank]:
            self._count(phase, num_rows * math.prod(tensor.shape[1:]) * tensor.element_size())
        return made


class ToMembers(torch.autograd.Function):
    """Rows of several tensors to the members; their gradients, divided by ``scale``, back to the holders."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, scale: float, *tensors: torch.Tensor) -> Any:
        """Moves the rows to the members."""
        ctx.exchange, ctx.scale = exchange, scale
        return tuple(_fresh(tensor, exchange.to_members(tensor)) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Moves the gradients back to the holders."""
        ctx.exchange.begin(steps.TO_HOLDERS)
        return None, None, *(scaled(ctx.exchange.to_holders(grad, "backward"), 1 / ctx.scale) for grad in grads)


class ToHolders(torch.autograd.Function):
    """Results to the holders; their gradients, times ``scale``, back to the members.

    Besides the results it returns an empty tensor that nobody uses: a way into the backward for a rank whose loss is
    made of something else.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, scale: float, *tensors: torch.Tensor) -> Any:
        """Moves the results to the holders."""
        ctx.exchange, ctx.scale = exchange, scale
        return *(_fresh(tensor, exchange.to_holders(tensor)) for tensor in tensors), tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Moves their gradients to the members."""
        ctx.exchange.begin(steps.TO_MEMBERS)
        moved = (ctx.exchange.to_members(grad, "backward") for grad in grads[:-1])
        return None, None, *(scaled(grad, ctx.scale) for grad in moved)


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
    return made.view_as(made) if made is given else made
