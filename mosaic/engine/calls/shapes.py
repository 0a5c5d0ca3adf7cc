"""Shapes and strides of an operator's results before it runs: those of one run on zeros, then remembered.

Sums depend on the order in which memory is read, and torch's meta device does not always have the strides of kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAX_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Results:
    """An operator's results: tensors on the meta device, or which of its tensor arguments is returned."""

    leaves: tuple[torch.Tensor | int, ...]
    """In order."""
    spec: pytree.TreeSpec
    """How they nest."""

    @property
    def num_bytes(self) -> int:
        """Memory of the new tensors."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, torch.Tensor))


class ShapeTable:
    """Results of the operators seen so far."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Results | None] = {}

    def results(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Results | None:
        """Returns what ``func`` will return; None if that depends on values or torch has no rule for it."""
        key = _key((args, kwargs))
        if key is None:
            return _ask(func, args, kwargs)
        key = (func, key)
        if key not in self._known:
            if len(self._known) >= _MAX_KEPT:  # shapes that never repeat
                self._known.clear()
            self._known[key] = _ask(func, args, kwargs)
        return self._known[key]


def _ask(func: Any, args: Any, kwargs: dict[str, Any]) -> Results | None:
    numbers: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def like(tensor: torch.Tensor) -> torch.Tensor:
        made = _zeros_like(tensor)
        numbers[id(made)] = len(kept)
        kept.append(made)
        return made

    args, kwargs = pytree.tree_map_only(torch.Tensor, like, (args, kwargs))
    try:
        with torch.no_grad():
            result = func(*args, **kwargs)
    except Exception:  # zeros or shapes that do not fit: the real operator says what is wrong
        return None
    leaves, spec = pytree.tree_flatten(result)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return Results(tuple(numbers[id(leaf)] if id(leaf) in numbers else on_meta(leaf) for leaf in leaves), spec)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns zeros with a tensor's strides; its own values may not be there yet."""
    sizes = tuple(zip(tensor.size(), tensor.stride(), strict=True))
    num_elements = 0 if tensor.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in sizes)
    return torch.zeros(num_elements, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without values that has a tensor's shape, strides and dtype."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _key(value: Any) -> Hashable | None:
    """Returns what decides the results' shapes; None for arguments that cannot be compared."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.size()), value.stride(), value.dtype)
    if isinstance(value, _ATOMS):
        return (type(value), value)
    if isinstance(value, dict):
        value = tuple(item for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        parts = tuple(_key(item) for item in value)
        return None if None in parts else parts
    return None


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Returns shapes and dtypes of the tensors among leaves: what a plan was made for.

    Scalars do not count: they are no work, and trainers slip some in (the number of tokens that a loss is divided by).
    """
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())


def other_inputs(planned: Any, found: tuple[tuple[Any, ...], ...]) -> str:
    """Says how a call's shapes, as ``shapes_of`` returns them, differ from what a plan was made for."""
    if [shape for shape, _ in planned] != [shape for shape, _ in found]:
        return "its inputs have other shapes than the plan was made for"
    return (
        "its inputs have another dtype than the plan was made for; let the sample run as the loop's batches do, under "
        "the same autocast"
    )
