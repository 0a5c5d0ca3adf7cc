"""A placed module: its lane, what is known of its calls, and its gradients while several calls are in flight."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.signature import Signature
from mosaic.engine.host.lane_tensor import LaneTensor

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket
    from mosaic.engine.host.call import Call
    from mosaic.engine.host.executor import Executor


class Site:
    """Where and how one module runs.

    Attributes:
        name: The module's name in the graph.
        lane: The lane that its plan gives it.
        signatures: What is known of its calls, by kind.
        obstacle: Why it never runs on its lane, or None.
        shapes: The input shapes that the plan was made for; calls with others run in place. None allows any.
        is_alone: Whether it has all slots of the device and a stage to itself, so that a lane would gain nothing.
        parted: Ids of the module's parameters that only others use; a call that uses one runs in place.
        last_forward: The last forward that went to the lane, or None.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module | None,
        lane: Lane,
        *,
        obstacle: str | None = None,
        shapes: Hashable = None,
        is_alone: bool = False,
        parted: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.lane = lane
        self.signatures: dict[Hashable, Signature] = {}
        self.obstacle = obstacle
        self.shapes = shapes
        self.is_alone = is_alone
        self.parted = parted
        self._module = weakref.ref(module) if module is not None else None
        self._anchor = torch.empty(0, requires_grad=True)
        self._in_flight: weakref.WeakSet[Call] = weakref.WeakSet()
        self._in_place: weakref.WeakSet[_InPlace] = weakref.WeakSet()
        self.last_forward: Ticket[Any] | None = None

    @property
    def module(self) -> torch.nn.Module | None:
        """The placed module; None for a function, or once the module is gone."""
        return self._module() if self._module is not None else None

    @property
    def anchor(self) -> torch.Tensor:
        """An empty leaf that makes a call's results differentiable where only its parameters are."""
        return self._anchor

    def parts(self) -> tuple[tuple[bool, ...], list[torch.nn.Parameter]]:
        """Returns the training mode of each part of the module, and its parameters that take a gradient."""
        modes: list[bool] = []
        parameters: dict[int, torch.nn.Parameter] = {}
        module = self.module
        todo = [] if module is None else [module]
        while todo:
            part = todo.pop()
            modes.append(part.training)
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    parameters[id(parameter)] = parameter
            todo.extend(child for child in part._modules.values() if child is not None)
        return tuple(modes), list(parameters.values())

    def entered(self, call: Call) -> None:
        """Notes a call on the lane whose backward may come."""
        self._in_flight.add(call)

    def left(self, call: Call) -> None:
        """Notes that a call's backward is over."""
        self._in_flight.discard(call)

    def forget_calls(self) -> None:
        """Forgets calls whose results nobody got, though a traceback may keep them alive."""
        self._in_flight.clear()
        self._in_place.clear()

    @property
    def is_in_flight(self) -> bool:
        """Whether a call on the lane waits for its backward."""
        return bool(self._in_flight)

    @property
    def is_in_place(self) -> bool:
        """Whether a call that ran in place waits for its backward."""
        return bool(self._in_place)

    def ran_in_place(self, executor: Executor, outputs: Sequence[torch.Tensor]) -> None:
        """Follows the results of a call that ran in place until its backward.

        Its backward runs in the caller's graph. If later calls of the same backward ran on the lane, both would add
        to the same gradients at once; so until then they run in place too. And gradients that a lane computed, for
        operations on these results, become plain here, so that none gets into the module.
        """
        call = _InPlace()

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            if self._in_flight:
                executor.backwards.current()
                self.before_backward(executor)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self._in_place.discard(call)
            return grad.value() if isinstance(grad, LaneTensor) else grad

        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(arrived)
                self._in_place.add(call)  # its life is that of the hooks

    def before_backward(self, executor: Executor) -> None:
        """Keeps gradient sums in the plain order when one backward goes through several calls of the module.

        The engine would add the gradients of all calls before it adds them to what a parameter has from earlier
        backwards. So what is there is set aside and added at the end.
        """
        if len(self._in_flight) + len(self._in_place) > 1:
            for parameter in self.parts()[1]:
                executor.gradients.set_aside(parameter)


class _InPlace:
    """Stands for one call that ran in place."""
