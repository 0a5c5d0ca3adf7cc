"""Moving rows between ranks, differentiably: forward one way, gradients back the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mosaic.ranks.calls import steps
from mosaic.ranks.calls.steps import Step
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.world.groups import carrier_of
from mosaic.ranks.world.progress import SentPhase

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked


class Exchange:
    """Moves one call's rows over its module's own communicator, so that messages keep their order.

    Args:
        ranked: The module.
        routing: The way of its rows.
    """

    def __init__(self, ranked: Ranked, routing: RowRouting) -> None:
        self._ranked = ranked
        self._routing = routing

    def begin(self, step: Step) -> None:
        """Notes that what follows is a step, unless nothing travels."""
        if self._routing.num_moved:
            self._ranked.note(step)

    def to_members(self, tensor: torch.Tensor, phase: SentPhase = "forward") -> torch.Tensor:
        """Returns the rows that this rank gets as a member for those that it holds; none, where it is to have none."""
        rank = self._ranked.rank
        return self._moved(tensor, self._routing.sends(rank), self._routing.receives(rank), phase)

    def to_holders(self, tensor: torch.Tensor, phase: SentPhase = "forward") -> torch.Tensor:
        """Returns what became of the rows that this rank holds, for those that it has as a member."""
        rank = self._ranked.rank
        return self._moved(tensor, self._routing.receives(rank), self._routing.sends(rank), phase)

    def _moved(
        self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int], phase: SentPhase
    ) -> torch.Tensor:
        if not self._routing.num_moved:
            return tensor
        ranked = self._ranked
        made = tensor.new_empty((sum(receives), *tensor.shape[1:]))
        given = tensor.contiguous()
        with ranked.waiting(phase):
            group = carrier_of(given, ranked.group, ranked.control)
            # NCCL's own stream has the whole device, whatever SMs the current stream is confined to.
            dist.all_to_all_single(made, given, list(receives), list(sends), group=group, async_op=True).wait()
        if num_rows := sum(sends) - sends[ranked.rank]:
            ranked.traffic.add(ranked.name, phase, num_rows * math.prod(tensor.shape[1:]) * tensor.element_size())
        return made


class ToMembers(torch.autograd.Function):
    """Rows of several tensors to the members; their gradients, divided by ``scale``, back."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, scale: float, *tensors: torch.Tensor) -> Any:
        """Moves the rows to the members."""
        ctx.exchange, ctx.scale = exchange, scale
        return tuple(_fresh(tensor, exchange.to_members(tensor)) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Moves the gradients back to where the rows came from."""
        ctx.exchange.begin(steps.TO_HOLDERS)
        moved = (ctx.exchange.to_holders(grad, "backward") for grad in grads)
        return None, None, *(scaled(grad, 1 / ctx.scale) for grad in moved)


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
    return made.detach() if made is given else made  # a view could not be changed in place
