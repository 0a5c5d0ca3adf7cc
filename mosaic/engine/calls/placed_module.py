"""A placed module: its lane, its known kinds of calls, and the calls that wait for their backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from mosaic.backends.base import Lane, Ticket
from mosaic.engine.calls.hidden import ModuleState, Parts, read_settings
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.signature import Signature
from mosaic.find.structure import versions_of

MAX_KINDS = 1000  # of calls of a module, such as shapes; the oldest are forgotten
MAX_VARIANTS = 32  # of a module's attributes; with more it runs in place


class PlacedModule:
    """The place of one module and the state of its calls."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module | None,
        lane: Lane,
        *,
        shapes: tuple[tuple[Any, ...], ...] | None = None,
        is_alone: bool = False,
        parted: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.lane = lane
        self.signatures: dict[Hashable, Signature] = {}  # what is known of its calls, by kind
        self.obstacle: str | None = None  # why it never runs on its lane, or None
        self.has_fast_path = False  # it has modules of torch's that compute other bits where a mode is active
        self.shapes = shapes  # that the plan was made for; calls with others run in place on the host
        self.is_alone = is_alone  # has the device and a stage to itself, so that a lane would gain nothing
        self.parted = parted  # ids of the module's parameters that only others use; a call that uses one runs in place
        # Makes a call's results differentiable where only its parameters are.
        self.anchor = torch.empty(0, requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node
        self.last_forward: Ticket[Any] | None = None  # the last forward that went to the lane, or None
        self.number = 0  # of that
        self.alone: str | None = None  # why two calls in one backward would sum gradients in another order on a lane
        self.in_flight: weakref.WeakSet[Any] = weakref.WeakSet()  # calls on the lane that wait for their backward
        self.in_place = PendingBackwards()  # calls that ran in place and wait for it
        self._has_written = False
        self._num_variants = 0
        self._variants: list[Parts] = []  # the latest one last
        self._module = weakref.ref(module, lambda _: self._variants.clear()) if module is not None else None

    @property
    def module(self) -> torch.nn.Module | None:
        """The placed module; None for a function, or once the module is gone."""
        return self._module() if self._module is not None else None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._parts().parameters if parameter.requires_grad]

    def state(self) -> ModuleState:
        parts = self._parts()
        trained = [parameter for parameter in parts.parameters if parameter.requires_grad]
        return ModuleState(parts, trained, read_settings(), versions_of(parts.tensors))

    def _parts(self) -> Parts:
        """Returns the parts of the module: the same object while nothing about them changes."""
        for parts in reversed(self._variants):
            if parts.is_now():
                return parts
        if len(self._variants) == MAX_VARIANTS:
            self._variants.clear()
            self.obstacle = Obstacle("its attributes change from call to call", remedy="pass these as arguments")
        self._num_variants += 1
        self._variants.append(Parts(self.module, self._num_variants))
        return self._variants[-1]

    def learned(self, kind: Hashable, signature: Signature, written: str | None) -> None:
        """Keeps what the first call of a kind showed; the oldest of too many kinds goes.

        A module may write something once, to keep it for later calls; the next call is learned from, too.
        """
        self.alone = self.alone or signature.alone
        if written is not None and self._has_written:
            self.obstacle = Obstacle(
                f"it writes {written}, which others may read too early", remedy="return it, and pass it as an argument"
            )
        self._has_written = written is not None
        if written is None:
            if len(self.signatures) >= MAX_KINDS:
                del self.signatures[next(iter(self.signatures))]
            self.signatures[kind] = signature

    def forget_calls(self) -> None:
        """Forgets calls whose results nobody got, though a traceback may keep them alive."""
        self.in_flight.clear()
        self.in_place = PendingBackwards()


class PendingBackwards:
    """Calls in the caller's own graph until their backward, which adds to the gradients that a lane's would."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._calls)

    def note(self, results: Iterable[torch.Tensor], arrived: Callable[[torch.Tensor], Any] | None = None) -> None:
        """Follows a call's results; ``arrived`` is a hook for their gradients."""
        calls, call = self._calls, _Call()

        def hook(grad: torch.Tensor) -> Any:
            instead = None if arrived is None else arrived(grad)
            if arrived is not None or not torch._C._autograd._get_current_graph_task_keep_graph():  # or another follows
                calls.discard(call)
            return instead

        for tensor in results:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(hook)
                calls.add(call)  # its life is that of the hooks


class _Call:
    """Stands for one call."""


class LastGradients:
    """Hooks on the first trainable parameter of each watched module, which gets its gradient last."""

    def __init__(self) -> None:
        self._hooked: dict[str, tuple[torch.nn.Parameter, Any]] = {}

    def watch(self, site: PlacedModule, arrived: Callable[[], None]) -> bool:
        """Calls ``arrived`` whenever a backward of the module ends; returns False if no leaf gets a gradient."""
        hooked = self._hooked.get(site.name)
        if hooked is not None and hooked[0].requires_grad:
            return True
        # functional_call lends a module weights that are no leaves
        first = next((parameter for parameter in site.parameters if parameter.is_leaf), None)
        if first is None:
            return False
        if hooked is not None:
            hooked[1].remove()
        self._hooked[site.name] = (first, first.register_post_accumulate_grad_hook(lambda _: arrived()))
        return True

    def close(self) -> None:
        for _, hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()


def owner_of(function: Callable[..., Any]) -> torch.nn.Module | None:
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None
