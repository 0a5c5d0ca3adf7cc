"""Gradients of leaves while lanes compute them, and sums kept in the plain loop's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mosaic.engine.lane_tensor import LaneTensor


class LeafGradients:
    """Watches leaves that operations between modules use, such as a projection's weight.

    The caller's backward does not wait for a gradient that a lane computes: ``grad`` holds a lane tensor until
    that backward has ended, and a plain one from then on.
    """

    def __init__(self, before_first: Callable[[], None]) -> None:
        """Takes what to do when a lane's gradient arrives: making sure that ``settle`` is called in time."""
        self._before_first = before_first
        self._expected: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def unsettled(self) -> bool:
        """Whether something was set aside and not yet added back."""
        return bool(self._aside)

    def expect(self, leaf: torch.Tensor) -> None:
        """Prepares a leaf whose gradient a lane may compute."""
        if id(leaf) not in self._expected:
            self._expected[id(leaf)] = leaf
            self._hooks.append(leaf.register_hook(lambda grad: self._arrived(leaf, grad)))

    def set_aside(self, leaf: torch.Tensor) -> None:
        """Keeps what ``leaf.grad`` has from earlier backwards out of the way until this one has ended.

        The engine adds up all of one backward's gradients before it adds them to what was there; so do we.
        """
        if leaf.grad is not None:
            self._aside.append((leaf, leaf.grad))
            leaf.grad = None

    def settle(self) -> None:
        """Makes all gradients plain and whole again; the lanes must be at rest."""
        for leaf in self._expected.values():
            if isinstance(leaf.grad, LaneTensor):
                leaf.grad = leaf.grad.value()
        aside, self._aside = self._aside, []
        for leaf, earlier in reversed(aside):
            if leaf.grad is not None:
                earlier.add_(leaf.grad)
            leaf.grad = earlier

    def close(self) -> None:
        """Takes its hooks off the leaves."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._expected.clear()

    def _arrived(self, leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, LaneTensor):
            self._before_first()
            self.set_aside(leaf)
        return grad
