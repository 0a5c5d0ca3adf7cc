"""A placed module: its lane, what is known of its calls, and its gradients while several calls are in flight."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from mosaic.engine.signature import Signature

if TYPE_CHECKING:
    from mosaic.backends.base import Lane
    from mosaic.engine.call import Call
    from mosaic.engine.executor import Executor


class Site:
    """Where and how one module runs.

    Attributes:
        name: The module's name in the graph.
        lane: The lane that its plan gives it.
        signatures: What is known of its calls, by kind.
        obstacle: Why it never runs on its lane, or None.
        shapes: The input shapes that the plan was made for; calls with others run in place. None allows any.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module | None,
        lane: Lane,
        *,
        obstacle: str | None = None,
        shapes: Hashable = None,
    ) -> None:
        self.name = name
        self.lane = lane
        self.signatures: dict[Hashable, Signature] = {}
        self.obstacle = obstacle
        self.shapes = shapes
        self._module = weakref.ref(module) if module is not None else None
        self._anchor = torch.empty(0, requires_grad=True)
        self._in_flight: weakref.WeakSet[Call] = weakref.WeakSet()

    @property
    def module(self) -> torch.nn.Module | None:
        """The placed module; None for a function, or once the module is gone."""
        return self._module() if self._module is not None else None

    @property
    def anchor(self) -> torch.Tensor:
        """An empty leaf that makes a call's results differentiable where only its parameters are."""
        return self._anchor

    def entered(self, call: Call) -> None:
        """Notes a call whose backward may come."""
        self._in_flight.add(call)

    def before_backward(self, executor: Executor, call: Call) -> None:
        """Keeps gradient sums in the plain order when one backward goes through several calls of the module.

        The engine would add the gradients of all calls before it adds them to what a parameter has from earlier
        backwards. So what is there is set aside and added at the end.
        """
        module = self.module
        if module is None or len(self._in_flight) < 2:
            return
        for parameter in module.parameters():
            executor.gradients.set_aside(parameter)

    def left(self, call: Call) -> None:
        """Notes that a call's backward is over."""
        self._in_flight.discard(call)
