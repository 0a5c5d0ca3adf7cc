"""Taking nested arguments and results apart into tensors, and putting them together again."""

from __future__ import annotations

import copy
import dataclasses
import enum
import operator
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, bytes, slice, enum.Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Leaves that cannot hide a tensor, and that compare by value."""
_FLAT_TYPES = (torch.Tensor, *PLAIN_TYPES)
_LEAF = pytree.tree_flatten(None)[1]
_VERSION = operator.attrgetter("_version")


def flatten(value: object) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the leaves of nested dicts, lists, tuples and containers that torch's pytrees know, and how they nest."""
    return ([value], _LEAF) if isinstance(value, torch.Tensor) else pytree.tree_flatten(value)


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    return leaves[0] if spec is _LEAF else pytree.tree_unflatten(leaves, spec)


@dataclasses.dataclass(slots=True, eq=False)
class Nesting:
    """The nesting of a call's arguments; equal nestings are one object, which is quicker to compare than a spec."""

    spec: pytree.TreeSpec
    num_args: int = 0
    names: tuple[str, ...] | None = None  # None for arguments that hold others

    def unflatten(self, leaves: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.names is None:
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)
            return args, kwargs
        return leaves[: self.num_args], dict(zip(self.names, leaves[self.num_args :], strict=True))


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Nesting]:
    leaves = [*args, *kwargs.values()]
    if any(map(is_opaque, leaves)):
        leaves, spec = flatten((args, kwargs))
        return leaves, _nesting_of(spec)
    return leaves, _flat_nesting(len(args), tuple(kwargs))


@lru_cache(maxsize=1000)
def _flat_nesting(num_args: int, names: tuple[str, ...]) -> Nesting:
    return Nesting(flatten(((None,) * num_args, dict.fromkeys(names)))[1], num_args, names)


_nesting_of = lru_cache(maxsize=1000)(Nesting)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns ``value`` with ``function`` applied to each tensor in it; what it leaves alone stays the same object."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is dict:
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        return value if all(map(operator.is_, mapped.values(), value.values())) else mapped
    is_sequence = isinstance(value, (tuple, list))
    if kind in (tuple, list) or (is_sequence and kind not in pytree.SUPPORTED_NODES and not hasattr(kind, "_fields")):
        items = [function(e) if isinstance(e, torch.Tensor) else map_tensors(function, e) for e in value]
        return value if all(map(operator.is_, items, value)) else items if isinstance(value, list) else tuple(items)
    if isinstance(value, PLAIN_TYPES):
        return value
    if dataclasses.is_dataclass(value) and kind not in pytree.SUPPORTED_NODES and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        mapped, twin = map_tensors(function, fields), copy.copy(value)
        for name, item in mapped.items():
            object.__setattr__(twin, name, item)
        return value if mapped is fields else twin
    leaves, spec = flatten(value)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return value
    return unflatten([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns all tensors in nested containers, in order, repeated where they repeat."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, value)
    return tensors


def memory_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory, which views share; 0 for a tensor without storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
        return 0


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns how often a tensor was written to; None where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:  # torch's answer for a tensor of inference mode
        return None


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def is_opaque(leaf: object) -> bool:
    return not isinstance(leaf, _FLAT_TYPES)


def leaf_key(leaf: object) -> Hashable:
    """Returns what must be equal for two calls to be the same call: shapes and strides of tensors, other values."""
    if isinstance(leaf, torch.Tensor):
        order: Hashable = leaf.layout
        if order is torch.strided:
            order = None if leaf.is_contiguous() else leaf.stride()
        return (leaf.shape, order, leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, slice):
        return ("slice", leaf.start, leaf.stop, leaf.step)
    if isinstance(leaf, PLAIN_TYPES):
        return (type(leaf), leaf)
    return type(leaf).__qualname__


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Returns shapes and dtypes of tensors, for which a plan is made; scalars, which trainers slip in, are no work."""
    return tuple([(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()])
