"""A placed module: its lane, what is known of its calls, and which of them wait for their backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from mosaic.engine.calls.hidden import ModuleState, Reading
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.signature import Signature
from mosaic.find.restore import same

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket

MAX_KINDS = 1000
"""Kinds of calls of a module that are remembered, such as shapes."""
MAX_VARIANTS = 8
"""Settings of a module's attributes that are learned; with more it runs in place."""


class PlacedModule:
    """The place of one module and the state of its calls.

    Attributes:
        name: The module's name in the graph.
        lane: The lane that its plan gives it.
        signatures: What is known of its calls, by kind.
        obstacle: Why it never runs on its lane, or None.
        shapes: The input shapes that the plan was made for; calls with others run in place. None allows any.
        is_alone: Whether it has all slots of the device and a stage to itself, so that a lane would gain nothing.
        parted: Ids of the module's parameters that only others use; a call that uses one runs in place.
        anchor: An empty leaf that makes a call's results differentiable where only its parameters are.
        anchor_node: Its node in the autograd graph.
        last_forward: The last forward that went to the lane, or None.
        in_flight: Calls on the lane that wait for their backward.
        in_place: Calls that ran in place and wait for it.
        awaited: Why its forward is waited for where it is called, or None.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module | None,
        lane: Lane,
        *,
        shapes: tuple[tuple[Any, ...], ...] | None = None,
        is_alone: bool = False,
        parted: frozenset[int] = frozenset(),
        awaited: str | None = None,
    ) -> None:
        self.name = name
        self.lane = lane
        self.signatures: dict[Hashable, Signature] = {}
        self.obstacle: str | None = None
        self.shapes = shapes
        self.is_alone = is_alone
        self.parted = parted
        self.awaited = awaited
        self.anchor = torch.empty(0, requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node
        self.last_forward: Ticket[Any] | None = None
        self.in_flight: weakref.WeakSet[Any] = weakref.WeakSet()
        self.in_place: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_written = False
        self._variants: list[Reading] = []
        self._module = weakref.ref(module, lambda _: self._variants.clear()) if module is not None else None

    @property
    def module(self) -> torch.nn.Module | None:
        """The placed module; None for a function, or once the module is gone."""
        return self._module() if self._module is not None else None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return ModuleState.take(self.module).trained

    def variant_of(self, reading: Reading) -> int:
        """Returns a number for how a module's attributes are now: the same for the same values."""
        for number, known in enumerate(self._variants):
            if same(known, reading):
                return number
        if len(self._variants) == MAX_VARIANTS:
            self.obstacle = Obstacle(
                "its attributes change from call to call",
                todo="pass what changes as an argument",
            )
        self._variants.append(reading)
        return len(self._variants) - 1

    def learned(self, kind: Hashable, signature: Signature, written: str | None) -> None:
        """Keeps what the first call of a kind showed; the oldest of too many kinds goes.

        A module may write something once, to keep it for later calls; the next call is learned from, too.
        """
        if written is not None and self._has_written:
            self.obstacle = Obstacle(
                f"it writes {written}, which others may read too early", todo="return it, and pass it as an argument"
            )
        self._has_written = written is not None
        if written is None:
            if len(self.signatures) >= MAX_KINDS:
                del self.signatures[next(iter(self.signatures))]
            self.signatures[kind] = signature

    def forget_calls(self) -> None:
        """Forgets calls whose results nobody got, though a traceback may keep them alive."""
        self.in_flight.clear()
        self.in_place.clear()


def owner_of(function: Callable[..., Any]) -> torch.nn.Module | None:
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None
