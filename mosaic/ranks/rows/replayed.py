"""Random numbers of one run drawn again in a run on fewer rows, so that dropout does not look like interaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_RATES = ("p", "dropout", "dropout_p", "train")
"""Arguments with which an operator draws nothing where they are 0 or False."""


class Replayed(TorchDispatchMode):
    """Has operators draw the same numbers in each run, in the order in which the first run drew them.

    Where a later run asks for fewer in one dimension, it is given the first ones. Each run is a block of its own.

    Attributes:
        is_exact: Whether every later draw was replayed; otherwise a run differs from the first for want of numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_exact = True
        self._kept: list[torch.Tensor] = []
        self._is_first = True
        self._place = 0

    def __enter__(self) -> Replayed:
        self._place = 0
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._is_first = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs an operator; gives one that draws the numbers of the first run."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_off(func, args, kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:  # the dropout of GPUs
            given, rate = args[0], float(args[1])
            mask = self._drawn(torch.empty_like(given).bernoulli_(1 - rate))
            return given * mask / (1 - rate), mask.bool()
        made = func(*args, **kwargs)
        if func.__name__.startswith("randperm"):  # one that leaves a row in its place may be drawn, and hide the others
            return self._drawn(made.sort().values.roll(-1))
        if not isinstance(made, torch.Tensor) or _reads_values(func):
            self.is_exact = False  # what it makes depends on more than on what is drawn
            return made
        return self._drawn(made)

    def _drawn(self, made: torch.Tensor) -> torch.Tensor:
        """Keeps what the first run drew; gives later ones the same."""
        if self._is_first:
            self._kept.append(made.clone())
            return made
        before = self._kept[self._place] if self._place < len(self._kept) else None
        self._place += 1
        first = None if before is None else _first_of(before, made.shape)
        if first is None or first.dtype != made.dtype:
            self.is_exact = False
            return made
        return made.copy_(first)


def _is_off(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws nothing, since its rate of dropout is 0."""
    given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    names = {one.name: one.default_value for one in func._schema.arguments if one.name in _RATES}
    return any(not given.get(name, default) for name, default in names.items())


def _reads_values(func: Any) -> bool:
    """Whether what an operator makes depends on the values of tensors: it is given some and does not overwrite them."""
    tensors = [one for one in func._schema.arguments if isinstance(one.type, torch.TensorType)]
    written = [one for one in tensors if one.alias_info is not None and one.alias_info.is_write]
    return bool(tensors) and not written and not func.__name__.partition(".")[0].endswith("_like")


def _first_of(drawn: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Returns the first of some numbers, in a shape that is smaller in one dimension at most; None if there is none."""
    differing = [dim for dim, (had, wanted) in enumerate(zip(drawn.shape, shape, strict=False)) if had != wanted]
    if drawn.dim() != len(shape) or len(differing) > 1:
        return None
    if not differing:
        return drawn
    (dim,) = differing
    return drawn.narrow(dim, 0, shape[dim]) if shape[dim] < drawn.shape[dim] else None
