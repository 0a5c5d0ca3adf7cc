"""Kinds of microbatches seen so far: a new kind may take another path through the model than the sample."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

MAX_KINDS = 16
"""Most kinds of microbatches that a chunk checks; with more, text is data rather than a switch."""


def kind_of(kwargs: Mapping[str, Any]) -> Hashable:
    """Returns the properties of a microbatch that may choose a path: switches, names, tensors' axes, empty tensors."""
    return tuple((name, _kind(value)) for name, value in sorted(kwargs.items(), key=lambda item: str(item[0])))


class WaysSeen:
    """Kinds of microbatches that each chunk has run.

    Args:
        known: The sample's kind.
    """

    def __init__(self, known: Hashable) -> None:
        self._known, self._kinds = known, dict[int, set[Hashable]]()

    def is_new(self, chunk: int, kwargs: Mapping[str, Any]) -> bool:
        """Returns True for a new kind of a chunk, and records it."""
        kind, known = kind_of(kwargs), self._kinds.setdefault(chunk, {self._known})
        if kind in known or len(known) >= MAX_KINDS:
            return False
        known.add(kind)
        return True


def is_alike(first: Any, second: Any) -> bool:
    """Returns True if two runs of a chunk gave equal tensors, up to rounding."""
    pairs = zip(_tensors(first), _tensors(second), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-5, equal_nan=True) for a, b in pairs)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]


def _kind(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return kind_of(value)
    if isinstance(value, torch.Tensor):
        return value.ndim, value.numel() > 0
    return value if isinstance(value, bool | str | None) else type(value).__qualname__
