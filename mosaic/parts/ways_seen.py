"""Which ways through a model chunks have taken: a microbatch of a new kind may take another one than the sample."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

MAX_KINDS = 16
"""Kinds of microbatches of a chunk that are looked at; where there are more, text is no switch, but data."""


def kind_of(kwargs: Mapping[str, Any]) -> Hashable:
    """Returns what of a microbatch may decide which way is taken: switches, names, tensors' axes, and empty ones."""
    return tuple((name, _kind(value)) for name, value in sorted(kwargs.items(), key=lambda item: str(item[0])))


class WaysSeen:
    """Kinds of microbatches that each chunk has run.

    Args:
        known: The sample's kind.
    """

    def __init__(self, known: Hashable) -> None:
        self._known, self._kinds = known, dict[int, set[Hashable]]()

    def is_new(self, chunk: int, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a chunk has run nothing of this kind, and notes it."""
        kind, known = kind_of(kwargs), self._kinds.setdefault(chunk, {self._known})
        if kind in known or len(known) >= MAX_KINDS:
            return False
        known.add(kind)
        return True


def is_alike(one: Any, other: Any) -> bool:
    """Returns whether two runs of a chunk made the same, up to rounding."""
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-5, equal_nan=True) for a, b in pairs)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]


def _kind(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return kind_of(value)
    if isinstance(value, torch.Tensor):
        return value.ndim, value.numel() > 0
    return value if isinstance(value, bool | str | None) else type(value).__qualname__
