"""Memory layouts of gradients: the plain loop's, learned in the backward of the first call of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mosaic.engine.calls.branch_graph import Use
from mosaic.engine.calls.signature import Layouts


def layouts_of(grads: Sequence[torch.Tensor | None]) -> Layouts:
    """Returns the strides of gradients, None for each that is missing."""
    return tuple([None if grad is None else _strides(grad) for grad in grads])


def _strides(grad: torch.Tensor) -> tuple[int, ...]:
    """Returns strides; those of dimensions with one element say nothing and are 1."""
    return tuple([stride if size > 1 else 1 for size, stride in zip(grad.size(), grad.stride(), strict=True)])


class LayoutWatch:
    """Looks on while autograd goes back through a call that ran where it was made.

    Args:
        made: Tensors that the call made.
        uses: Its uses of inputs.
        known: Where to put what is seen: by the layouts of the gradients of ``made``, those of ``uses``.
    """

    def __init__(self, made: Sequence[torch.Tensor], uses: Sequence[Use], known: dict[Layouts, Layouts]) -> None:
        self._known = known
        self._task = -1
        self._came: list[tuple[int, ...] | None] = [None] * len(made)
        self._left: list[tuple[int, ...] | None] = [None] * len(uses)
        for index, tensor in enumerate(made):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._note_result, index))
        for index, use in enumerate(uses):
            use.node.register_hook(partial(self._note_use, index, use.position))

    def _note_result(self, index: int, grad: torch.Tensor) -> None:
        self._begin()
        self._came[index] = _strides(grad)

    def _note_use(self, index: int, position: int, grads: Sequence[torch.Tensor | None], _: Any) -> None:
        self._begin()
        grad = grads[position]
        self._left[index] = None if grad is None else _strides(grad)

    def _begin(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._came = [None] * len(self._came)
            self._left = [None] * len(self._left)
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _end(self) -> None:
        if None not in self._left:  # where some are missing, perhaps nobody asked for them this time
            self._known.setdefault(tuple(self._came), tuple(self._left))
