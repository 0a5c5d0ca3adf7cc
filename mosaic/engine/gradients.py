"""Gradients of leaves while lanes compute them, and sums kept in the plain loop's order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mosaic.engine.host.lane_tensor import LaneTensor


class LeafGradients:
    """Watches leaves that operations between modules use, such as a projection's weight.

    The caller's backward does not wait for a gradient that a lane computes: ``grad`` holds a lane tensor until
    that backward has ended, and a plain one from then on.
    """

    def __init__(self, before_first: Callable[[], object]) -> None:
        """Takes what to do when a lane's gradient arrives: making sure that ``settle`` is called in time."""
        self._before_first = before_first
        self._expected: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def expect(self, leaf: torch.Tensor) -> None:
        """Prepares a leaf whose gradient a lane may compute."""
        key = id(leaf)
        if key in self._expected:
            return
        expected = self._expected

        def gone(ref: weakref.ref[torch.Tensor]) -> None:
            if key in expected and expected[key][0] is ref:
                del expected[key]

        ref = weakref.ref(leaf, gone)

        def arrived(grad: torch.Tensor) -> torch.Tensor:
            found = ref()
            return grad if found is None else self._arrived(found, grad)

        expected[key] = (ref, leaf.register_hook(arrived))

    def is_hooked_by_others(self, leaf: torch.Tensor) -> bool:
        """Whether somebody else hangs on a leaf's gradient."""
        ours = 1 if id(leaf) in self._expected else 0
        return len(leaf._backward_hooks or ()) > ours or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))

    def set_aside(self, leaf: torch.Tensor) -> None:
        """Keeps what ``leaf.grad`` has from earlier backwards out of the way until this one has ended.

        The engine adds up all of one backward's gradients before it adds them to what was there; so do we. Doing
        it again during the same backward does nothing.
        """
        if id(leaf) not in self._aside:
            self._aside[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    def settle(self) -> None:
        """Makes all gradients plain and whole again; the lanes must be at rest."""
        for ref, _ in list(self._expected.values()):
            leaf = ref()
            if leaf is not None and isinstance(leaf.grad, LaneTensor):
                leaf.grad = leaf.grad.value()
        aside, self._aside = self._aside, {}
        for leaf, earlier in aside.values():
            if earlier is None:
                continue
            if leaf.grad is not None:
                with torch.no_grad():
                    earlier = _added(earlier, leaf.grad)
            leaf.grad = earlier

    def close(self) -> None:
        """Takes its hooks off the leaves."""
        for _, hook in self._expected.values():
            hook.remove()
        self._expected.clear()

    def _arrived(self, leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if not isinstance(grad, LaneTensor):
            return grad
        if _is_asked_for(leaf):
            return grad.value()
        self._before_first()
        self.set_aside(leaf)
        return grad


def _added(earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Adds as autograd does: in place, unless that would make a dense gradient of a sparse one."""
    if earlier.is_sparse and not later.is_sparse:
        return later + earlier
    return earlier.add_(later)


def _is_asked_for(leaf: torch.Tensor) -> bool:
    """Whether the running backward is a ``torch.autograd.grad`` that returns this leaf's gradient."""
    try:
        return not torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # torch's answer for a leaf whose gradient is returned
        return True
