"""Pieces on streams that share a parameter or a buffer: they keep to the order in which they were called.

Nothing but arguments orders the lanes of a block. Two pieces with a module in common would write its running statistics
at once, and under autocast one would read the cast that the other is making of a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.branch_graph import find_leaves
from mosaic.engine.calls.pieces import identity_of, owner_of
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.streams.tensor import on_user_stream


class KnownPiece:
    """One function under one name, and what is known of it.

    Attributes:
        name: The name.
        reason: Why its calls keep to the order of the user's stream, or None.
        tensors: Parameters and buffers that it uses, as far as they are known.
        given: Leaves behind the arguments of its first call; None if what it uses is known.
    """

    def __init__(self, name: str, owner: nn.Module | None) -> None:
        self.name = name
        self.reason: str | None = None
        self.tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.given: set[int] | None = None
        self._owner = weakref.ref(owner) if owner is not None else None

    @property
    def owner(self) -> nn.Module | None:
        """The module that it is, or that it is a method of; ids of modules that are gone are given out again."""
        return self._owner() if self._owner is not None else None

    def shares_with(self, other: KnownPiece) -> bool:
        """Whether it has a tensor that another has, too."""
        return any(other.tensors.get(key) is tensor for key, tensor in self.tensors.items())


class SharedPieces:
    """Finds out what pieces share, and keeps those that do in order.

    Of a module it is known before its first call. The first call of any other function runs with nothing beside it,
    and the leaves of its results tell which parameters it uses; what it uses without gradients is not seen.

    Args:
        in_order: Names that keep to the order of the user's stream, each with the reason; written here.
        settle: Makes the user's stream wait for all lanes.
    """

    def __init__(self, in_order: dict[str, str], *, settle: Callable[[], None]) -> None:
        self._in_order = in_order
        self._settle = settle
        self._pieces: dict[Hashable, KnownPiece] = {}
        self._hooks: dict[nn.Module, Any] = {}

    def begin(self, name: str, function: Callable[..., Any], given: Any) -> KnownPiece:
        """Prepares the call of a function with the arguments ``given``."""
        owner = owner_of(function)
        key = (name, identity_of(function), id(owner), torch.is_grad_enabled())
        piece = self._pieces.get(key)
        if piece is None or piece.owner is not owner:
            piece = self._pieces[key] = KnownPiece(name, owner)
            if isinstance(function, nn.Module):
                self._learn(piece, [*function.parameters(), *function.buffers()])
            else:
                piece.given = {id(leaf) for leaf in find_leaves(tensors_in(given))}
                piece.reason = "its first call tells what it shares with others"
            if piece.reason is not None:
                self._settle()
        if piece.reason is not None:
            self._in_order[name] = piece.reason
        else:
            self._in_order.pop(name, None)
        return piece

    def note(self, piece: KnownPiece, function: Callable[..., Any], result: Any, *, hooked: bool) -> None:
        """Notes the result of a call.

        Args:
            piece: What was called.
            function: The same.
            result: The result.
            hooked: Whether to look for calls of its module between pieces. Graphs refuse modules with hooks.
        """
        if piece.given is not None:
            leaves = [leaf for leaf in find_leaves(tensors_in(result)) if id(leaf) not in piece.given]
            piece.given, piece.reason = None, None
            self._learn(piece, [*leaves, *_buffers_beside(leaves, piece.owner)])
        if hooked and isinstance(function, nn.Module) and function not in self._hooks:
            self._hooks[function] = function.register_forward_pre_hook(self._before)

    def end(self) -> None:
        """Ends a block."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _learn(self, piece: KnownPiece, tensors: Iterable[torch.Tensor]) -> None:
        piece.tensors.update((id(tensor), tensor) for tensor in tensors)
        for other in self._pieces.values():
            if other.name != piece.name and piece.shares_with(other):
                piece.reason = f"it shares a parameter or a buffer with {other.name!r}"
                other.reason = f"it shares a parameter or a buffer with {piece.name!r}"

    def _before(self, _module: nn.Module, _args: Any) -> None:
        """A module that ran on a lane in this block is called again, perhaps between pieces."""
        if not torch.compiler.is_compiling() and on_user_stream():
            self._settle()


def _buffers_beside(leaves: Iterable[torch.Tensor], owner: nn.Module | None) -> Iterator[torch.Tensor]:
    """Yields the buffers of those modules of a method's owner whose parameters the method uses."""
    used = {id(leaf) for leaf in leaves}
    for module in owner.modules() if owner is not None else ():
        if any(id(parameter) in used for parameter in module._parameters.values()):
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
