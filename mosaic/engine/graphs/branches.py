"""A branch of a stage: one call of it, taken apart, and the key that calls share which one capture can replay."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.structure import PLAIN_TYPES, flatten, is_opaque, leaf_key, unflatten


class RefusalError(Exception):
    """A branch cannot be captured.

    Attributes:
        reason: Why, as the end of a sentence that starts with the branch's name.
        lasting: Whether a later call of the same kind would fare no better.
    """

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBranch:
    """One call that a stage makes."""

    name: str
    run: Callable[..., Any]
    """Makes the call; launches everything on the current stream."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lane: StreamLane
    """Where it runs."""
    module: nn.Module | None
    """Whose call it is. Without it, ``run`` may use its arguments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """Stands for the result of a branch that the caller has to launch itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenCall:
    """A branch's arguments, taken apart."""

    branch: StageBranch
    leaves: tuple[Any, ...]
    """For each leaf of the arguments the index of its tensor, or ``(value,)`` for anything else."""
    spec: pytree.TreeSpec
    tensors: tuple[torch.Tensor, ...]
    """Distinct tensors, in order of appearance."""
    key: Hashable
    """Equal for calls of one kind: name, lane, function, nesting, and shapes and types or values of all arguments."""

    @staticmethod
    def take(branch: StageBranch, device: torch.device) -> TakenCall:
        """Takes a branch apart.

        Raises:
            RefusalError: An argument cannot be handed to a graph.
        """
        leaves, spec = flatten((branch.args, branch.kwargs))
        numbers: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        kept: list[Any] = []
        keys: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                _check_tensor(leaf, device)
                number = numbers.setdefault(id(leaf), len(tensors))
                if number == len(tensors):
                    tensors.append(leaf)
                kept.append(number)
                grad = leaf.requires_grad and torch.is_grad_enabled()
                keys.append((number, leaf.shape, leaf.stride(), leaf.dtype, grad))
            elif isinstance(leaf, enum.Enum) or not is_opaque(leaf):
                kept.append((leaf,))
                keys.append((type(leaf), leaf.name) if isinstance(leaf, enum.Enum) else leaf_key(leaf))
            else:
                raise RefusalError(f"it takes a {type(leaf).__name__}, which may hide tensors")
        key = (branch.name, id(branch.lane), id(branch.module), function_key(branch.run), spec, tuple(keys))
        return TakenCall(branch, tuple(kept), spec, tuple(tensors), key)

    def static_inputs(self) -> list[torch.Tensor]:
        """Makes leaves like the tensors, with their values, on the current stream."""
        grad = torch.is_grad_enabled()
        made = []
        for tensor in self.tensors:
            static = torch.empty_like(tensor, requires_grad=False)
            static.copy_(tensor.detach())  # without a gradient, whatever the caller's mode
            made.append(static.requires_grad_(tensor.requires_grad and grad))
        return made

    def without_tensors(self) -> TakenCall:
        """Returns the call without what it holds of the user's memory and autograd graph."""
        return replace(self, tensors=(), branch=replace(self.branch, args=(), kwargs={}))

    def run_on(self, tensors: list[torch.Tensor]) -> Any:
        """Makes the call with other tensors in place of its own."""
        args, kwargs = unflatten(
            [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self.leaves], self.spec
        )
        return self.branch.run(*args, **kwargs)


def _check_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise RefusalError(f"it takes a {type(tensor).__name__}, not a plain tensor")
    if tensor.device != device:
        raise RefusalError(f"it takes a tensor on {tensor.device}, not on {device}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        raise RefusalError("it takes a sparse, nested or lazily conjugated tensor")


def function_key(value: Any, depth: int = 4) -> Hashable:
    """Returns what tells functions apart, and stays the same for one that is made anew at each step.

    What is told apart by its id stays alive with the capture, since that keeps the function.
    """
    if isinstance(value, tuple):
        return tuple(function_key(item, depth) for item in value)
    if isinstance(value, PLAIN_TYPES):
        return leaf_key(value)
    if isinstance(value, functools.partial):
        return (function_key(value.func, depth), function_key((value.args, *sorted(value.keywords.items())), depth))
    if isinstance(value, MethodType):
        return (id(value.__self__), function_key(value.__func__, depth))
    if not isinstance(value, FunctionType) or depth == 0:
        return id(value)
    try:
        closed = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError:  # a cell that is empty as yet
        return id(value)
    defaults = (value.__defaults__ or (), *sorted((value.__kwdefaults__ or {}).items()))
    return (value.__code__, function_key((closed, defaults), depth - 1))
