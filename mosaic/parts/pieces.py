"""Cutting an encoder's tensors into pieces of some units, and joining what pieces gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mosaic.parts.split import ModelSplit


def count_units(split: ModelSplit, kwargs: Mapping[str, Any], module: str) -> int:
    """Returns how many units of a module a microbatch has, such as images; 0: it does not call the module.

    A module whose tensors have no rows in common, such as a language model that reads the images' sizes, has one.
    """
    if module not in split.present(kwargs):
        return 0
    units = _units(_tensors(split, kwargs, module))
    return 1 if units is None else units


def slice_piece(split: ModelSplit, kwargs: Mapping[str, Any], module: str, first: int, count: int) -> dict[str, Any]:
    """Returns a microbatch with a module's own tensors cut to some units.

    Units are rows of all its tensors; or, where the patches of all images lie behind each other in one tensor, rows of
    the tensor of whole numbers that gives each image's size in patches (``image_grid_thw``).

    Raises:
        ValueError: There are fewer units, or rows of its tensors are no units.
    """
    tensors = _tensors(split, kwargs, module)
    units = _units(tensors)
    if units is None:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"rows of the tensors of {module!r} are no units ({shapes}): they have different lengths, and none gives "
            "the sizes of the others; leave the module uncut"
        )
    if first < 0 or count < 1 or first + count > units:
        raise ValueError(f"units {first} to {first + count} of {module!r}; this microbatch has {units}")
    rows = slice(first, first + count)
    cut = {}
    for name, tensor in tensors.items():
        if len(tensor) == units:
            cut[name] = tensor[rows]
            continue
        sizes = _grid(tensors, len(tensor))
        assert sizes is not None
        begin = int(sizes[:first].sum())
        cut[name] = tensor[begin : begin + int(sizes[rows].sum())]
    return {**kwargs, **cut}


def join_pieces(pieces: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Joins what a module's pieces gave, as its successor receives it; gradients flow back to each."""
    if len(pieces) == 1:
        return pieces[0]
    return tuple(torch.cat(tensors) for tensors in zip(*pieces, strict=True))


def _tensors(split: ModelSplit, kwargs: Mapping[str, Any], module: str) -> dict[str, torch.Tensor]:
    names = split.by_name[module].inputs
    return {name: kwargs[name] for name in names if isinstance(kwargs.get(name), torch.Tensor) and kwargs[name].ndim}


def _units(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Returns the units of a module's tensors; None where their rows are none."""
    lengths = {len(tensor) for tensor in tensors.values()}
    units = min(lengths, default=0)
    for length in lengths - {units}:
        sizes = _grid(tensors, length)
        if sizes is None or len(sizes) != units:
            return None
    return units


def _grid(tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor | None:
    """Returns the rows of each unit, from the tensor whose rows' products sum up to ``length``."""
    for tensor in tensors.values():
        if not tensor.is_floating_point() and tensor.ndim == 2 and int(tensor.prod(-1).sum()) == length:
            return tensor.prod(-1)
    return None
