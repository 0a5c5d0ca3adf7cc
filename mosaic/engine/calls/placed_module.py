"""A placed module: its lane, what is known of its calls, and which of them wait for their backward."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.signature import Signature

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket


class PlacedModule:
    """Where and how one module runs.

    Attributes:
        name: The module's name in the graph.
        lane: The lane that its plan gives it.
        signatures: What is known of its calls, by kind.
        obstacle: Why it never runs on its lane, or None.
        shapes: The input shapes that the plan was made for; calls with others run in place. None allows any.
        is_alone: Whether it has all slots of the device and a stage to itself, so that a lane would gain nothing.
        parted: Ids of the module's parameters that only others use; a call that uses one runs in place.
        anchor: An empty leaf that makes a call's results differentiable where only its parameters are.
        last_forward: The last forward that went to the lane, or None.
        in_flight: Calls on the lane that wait for their backward.
        in_place: Calls that ran in place and wait for it.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module | None,
        lane: Lane,
        *,
        shapes: Hashable = None,
        is_alone: bool = False,
        parted: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.lane = lane
        self.signatures: dict[Hashable, Signature] = {}
        self.obstacle: str | None = None
        self.shapes = shapes
        self.is_alone = is_alone
        self.parted = parted
        self.anchor = torch.empty(0, requires_grad=True)
        self.last_forward: Ticket[Any] | None = None
        self.in_flight: weakref.WeakSet[Any] = weakref.WeakSet()
        self.in_place: weakref.WeakSet[Any] = weakref.WeakSet()
        self._module = weakref.ref(module) if module is not None else None

    @property
    def module(self) -> torch.nn.Module | None:
        """The placed module; None for a function, or once the module is gone."""
        return self._module() if self._module is not None else None

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

    def forget_calls(self) -> None:
        """Forgets calls whose results nobody got, though a traceback may keep them alive."""
        self.in_flight.clear()
        self.in_place.clear()

    @property
    def is_in_flight(self) -> bool:
        """Whether a call on the lane waits for its backward."""
        return bool(self.in_flight)

    @property
    def is_in_place(self) -> bool:
        """Whether a call that ran in place waits for its backward."""
        return bool(self.in_place)

    @property
    def num_pending(self) -> int:
        """How many calls wait for their backward."""
        return len(self.in_flight) + len(self.in_place)
