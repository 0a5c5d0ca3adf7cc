"""Shapes, strides and dtypes of tensors that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without values that has a tensor's shape, strides and dtype; a sparse one has no strides."""
    if tensor.layout != torch.strided:
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


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
