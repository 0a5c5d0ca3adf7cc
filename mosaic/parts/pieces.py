"""Sub-microbatches of an encoder: its tensors cut by units, and their results joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mosaic.parts.split import ModelSplit


def count_units(split: ModelSplit, kwargs: Mapping[str, Any], module: str) -> int:
    """Returns the number of a module's units in a microbatch, such as images; 0: it does not call the module.

    A module whose tensors share no rows, such as a language model that reads the images' sizes, has one.
    """
    if module not in split.present(kwargs):
        return 0
    units = _units(_tensors(split, kwargs, module))
    return 1 if units is None else units


def rows_of_units(split: ModelSplit, kwargs: Mapping[str, Any], module: str) -> tuple[int, ...] | None:
    """Returns the rows of each unit in a module's longest tensor; None if the tensors have no units."""
    tensors = _tensors(split, kwargs, module)
    units = _units(tensors)
    if not units:
        return None
    longest = max(map(len, tensors.values()))
    sizes = None if longest == units else _grid(tensors, longest)
    return (1,) * units if sizes is None else tuple(sizes.tolist())


def take_units(split: ModelSplit, kwargs: Mapping[str, Any], module: str, chosen: Sequence[int]) -> dict[str, Any]:
    """Returns a microbatch with a module's own tensors cut to some units.

    Units are rows of all its tensors; or, if one tensor holds the patches of all images, rows of the integer tensor
    with each image's size in patches (``image_grid_thw``).

    Raises:
        ValueError: A unit does not exist, or rows of its tensors are not units.
    """
    tensors = _tensors(split, kwargs, module)
    units = _units(tensors)
    if units is None:
        shapes = ", ".join(f"{'.'.join(path)} {tuple(tensor.shape)}" for path, tensor in tensors.items())
        raise ValueError(
            f"rows of the tensors of {module!r} are no units ({shapes}): they have different lengths, and none gives "
            "the sizes of the others; leave the module uncut"
        )
    if not chosen or not 0 <= min(chosen) <= max(chosen) < units:
        raise ValueError(f"units {', '.join(map(str, chosen)) or 'none'} of {module!r}; this microbatch has {units}")
    cut = dict(kwargs)
    for (name, *inner), tensor in tensors.items():
        pieces: Sequence[torch.Tensor] = tensor.split(1)
        if len(tensor) != units:
            sizes = _grid(tensors, len(tensor))
            assert sizes is not None
            pieces = tensor.split(sizes.tolist())
        own = torch.cat([pieces[unit] for unit in chosen])
        cut[name] = {**cut[name], inner[0]: own} if inner else own
    return cut


def join_pieces(pieces: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Joins the results of a module's pieces for its successor; gradients flow back to each."""
    if len(pieces) == 1:
        return pieces[0]
    return tuple(torch.cat(tensors) for tensors in zip(*pieces, strict=True))


def _tensors(split: ModelSplit, kwargs: Mapping[str, Any], module: str) -> dict[tuple[str, ...], torch.Tensor]:
    """Returns a module's tensors by keyword, or by keyword and key for a mapping."""
    values: dict[tuple[str, ...], Any] = {}
    for name in split.by_name[module].inputs:
        value = kwargs.get(name)
        values |= {(name, key): each for key, each in value.items()} if isinstance(value, Mapping) else {(name,): value}
    return {path: value for path, value in values.items() if isinstance(value, torch.Tensor) and value.ndim}


def _units(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> int | None:
    """Returns the number of units of a module's tensors; None if rows are not units."""
    lengths = {len(tensor) for tensor in tensors.values()}
    units = min(lengths, default=0)
    for length in lengths - {units}:
        sizes = _grid(tensors, length)
        if sizes is None or len(sizes) != units:
            return None
    return units


def _grid(tensors: Mapping[tuple[str, ...], torch.Tensor], length: int) -> torch.Tensor | None:
    """Returns the rows of each unit, from the tensor whose rows' products sum up to ``length``."""
    for tensor in tensors.values():
        if not tensor.is_floating_point() and tensor.ndim == 2 and int(tensor.prod(-1).sum()) == length:
            return tensor.prod(-1)
    return None
