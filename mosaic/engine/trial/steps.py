"""A step of the user's loop lies between two steps of an optimizer that holds the model's parameters.

With accumulation that is the whole cycle. A loop without an optimizer, which calls the model without gradients, is
counted in calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_CALLS_WITHOUT_OPTIMIZER = 8
_STEPS_OF_ANOTHER = 8


class StepUnit:
    """Tells at which optimizer steps, or calls of the model, a step of the loop begins.

    Of several optimizers the first that steps is the one that counts, until others step and it does not.

    Args:
        model: The model.

    Attributes:
        has_counted_calls: Whether calls of the model were counted, before the first optimizer step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._chosen: weakref.ref[Optimizer] | None = None
        self._others = 0
        self._calls = 0
        self.has_counted_calls = False
        self._is_frozen = not any(parameter.requires_grad for parameter in model.parameters())

    def begins_at_step(self, optimizer: Optimizer) -> bool:
        """Takes a step of any optimizer; returns whether a step of the loop begins here."""
        if not self._holds(optimizer):
            return False
        chosen = self._chosen() if self._chosen is not None else None
        if chosen is not optimizer:
            self._others += 1
            if chosen is not None and self._others < _STEPS_OF_ANOTHER:
                return False
            self._chosen = weakref.ref(optimizer)
        self._others = 0
        return True

    def begins_at_call(self) -> bool:
        """Takes a call of the whole model; returns whether a step of the loop begins here."""
        if self._chosen is not None:
            return False
        trains = torch.is_grad_enabled() and not self._is_frozen
        self._calls = 0 if trains else self._calls + 1
        self.has_counted_calls |= self._calls >= _CALLS_WITHOUT_OPTIMIZER
        return self._calls >= _CALLS_WITHOUT_OPTIMIZER

    def _holds(self, optimizer: Optimizer) -> bool:
        known = self._known.get(optimizer)
        if known is None or known[0] != len(optimizer.param_groups):
            model = self._model()
            own = {id(parameter) for parameter in model.parameters()} if model is not None else set()
            held = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            known = self._known[optimizer] = (len(optimizer.param_groups), held)
        return known[1]


def outer_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Returns the shapes of tensors among a call's arguments and one level inside of them: cheap, once a step."""
    found: list[Hashable] = [torch.is_grad_enabled()]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, Mapping):
            found.extend(item.shape for item in value.values() if isinstance(item, torch.Tensor))
        elif isinstance(value, (list, tuple)):
            found.extend(item.shape for item in value if isinstance(item, torch.Tensor))
    return tuple(found)
