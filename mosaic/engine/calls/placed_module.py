"""A placed module: its lane, what is known of its calls, and which of them wait for their backward."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.hidden.attributes import Attributes, Reading, Written, same
from mosaic.engine.calls.hidden.hidden_state import parts_of
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.signature import Signature

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket

MAX_KINDS = 1000
"""Kinds of calls of a module that are remembered, such as shapes."""
MAX_VARIANTS = 8
"""Settings of a module's attributes that are learned; with more it runs in place."""


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
        attributes: Reads the plain attributes of its parts.
        awaited: Why its forward is waited for where it is called, or None.
        wrote_outside: Whether its last call that was learned from wrote what is no attribute of its parts.
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
        self.last_forward: Ticket[Any] | None = None
        self.in_flight: weakref.WeakSet[Any] = weakref.WeakSet()
        self.in_place: weakref.WeakSet[Any] = weakref.WeakSet()
        self.attributes = Attributes()
        self.wrote_outside = False
        self._variants: list[Reading] = []
        self._module = weakref.ref(module, lambda _: self._variants.clear()) if module is not None else None

    @property
    def module(self) -> torch.nn.Module | None:
        """The placed module; None for a function, or once the module is gone."""
        return self._module() if self._module is not None else None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The module's parameters that take a gradient."""
        return parts_of(self.module).trained

    def variant_of(self, reading: Reading) -> int:
        """Returns a number for how a module's attributes are now: the same for the same values."""
        for number, known in enumerate(self._variants):
            if same(known, reading):
                return number
        if len(self._variants) == MAX_VARIANTS:
            self.obstacle = Obstacle(
                "its attributes, or those of objects that it refers to, change from call to call",
                todo="pass what changes as an argument",
            )
        self._variants.append(reading)
        return len(self._variants) - 1

    def learned(self, kind: Hashable, signature: Signature) -> None:
        """Keeps what is known of a kind of call; the oldest of too many goes."""
        if len(self.signatures) >= MAX_KINDS:
            del self.signatures[next(iter(self.signatures))]
        self.signatures[kind] = signature

    def note_writes(self, modules: Sequence[torch.nn.Module], before: Written) -> frozenset[str]:
        """Learns what a forward that has just ended wrote; returns the names of the module's own attributes."""
        outside = before.written_outside()
        if outside is not None and self.wrote_outside:  # once may be to keep something for later calls
            self.obstacle = Obstacle(
                f"it writes {outside!r}, a global or a variable that it encloses, which others may read too early",
                todo="keep it in an attribute",
            )
        self.wrote_outside = outside is not None
        known = len(self.attributes.own_writes)
        names = self.attributes.note_writes(modules, before)
        if len(self.attributes.own_writes) > known:  # what was read before had these in it
            self._variants.clear()
            self.signatures.clear()
        self.attributes.look_into(modules)
        if self.attributes.own_writes.keys() - set(map(id, modules)):
            self.awaited = self.awaited or "it writes into containers or objects among its attributes"
        return names

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
