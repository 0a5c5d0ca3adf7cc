"""Pieces of a stage on streams that share a parameter or a buffer: they keep to the order in which they were called.

Nothing but arguments orders the lanes of a stage. Two pieces with a module in common would write its running statistics
at once, and under autocast one would read the cast that the other is making of a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mosaic.engine.calls.branch_graph import find_leaves
from mosaic.engine.calls.torch_functions import all_tensors
from mosaic.engine.streams.tensor import on_user_stream

if TYPE_CHECKING:
    from mosaic.engine.streams.executor import StreamExecutor


class Piece:
    """One function under one name.

    Args:
        name: The name.
        function: The function.
        owner: The module that it is, or that it is a method of.

    Attributes:
        name: The same.
        reason: Why its calls keep to the order of the user's stream, or None.
        module: The module that the function is.
        tensors: Parameters and buffers that it uses, as far as they are known.
        given: Leaves behind the arguments of its first call; None if what it uses is known.
    """

    def __init__(self, name: str, function: Callable[..., Any], owner: nn.Module | None) -> None:
        self.name = name
        self.reason: str | None = None
        self.module = weakref.ref(function) if isinstance(function, nn.Module) else None
        self.tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.given: set[int] | None = None
        self.owner = weakref.ref(owner) if owner is not None else None

    def is_of(self, owner: nn.Module | None) -> bool:
        """Whether it is a piece of this module; ids of modules that are gone are given out again."""
        return (self.owner() if self.owner is not None else None) is owner

    def shares_with(self, other: Piece) -> bool:
        """Whether it has a tensor that another has, too."""
        return any(other.tensors.get(key) is tensor for key, tensor in self.tensors.items())


class SharedPieces:
    """Finds out what pieces share, and keeps those that do in order.

    Of a module it is known before its first call. The first call of any other function runs with nothing beside it,
    and the leaves of its results tell which parameters it uses; what it uses without gradients is not seen.

    Args:
        executor: Runs the pieces; what has to keep to the order of the user's stream is named in its ``in_order``.
    """

    def __init__(self, executor: StreamExecutor) -> None:
        self._executor = executor
        self._pieces: dict[Hashable, Piece] = {}
        self._hooks: dict[nn.Module, Any] = {}

    def begin(
        self, name: str, function: Callable[..., Any], owner: nn.Module | None, identity: Hashable, given: Any
    ) -> Piece:
        """Prepares the call of a function; ``identity`` tells functions of one owner apart."""
        key = (name, identity, id(owner), torch.is_grad_enabled())
        piece = self._pieces.get(key)
        if piece is None or not piece.is_of(owner):
            piece = self._pieces[key] = Piece(name, function, owner)
            if isinstance(function, nn.Module):
                self._learn(piece, [*function.parameters(), *function.buffers()])
            else:
                piece.given = {id(leaf) for leaf in find_leaves(all_tensors(given))}
                piece.reason = "its first call tells what it shares with others"
            if piece.reason is not None:
                self._executor.settle()
        if piece.reason is not None:
            self._executor.in_order[name] = piece.reason
        else:
            self._executor.in_order.pop(name, None)
        return piece

    def note(self, piece: Piece, result: Any, *, hooked: bool) -> None:
        """Notes the result of a call.

        Args:
            piece: What was called.
            result: The result.
            hooked: Whether to look for calls of its module between pieces. Graphs refuse modules with hooks.
        """
        if piece.given is not None:
            leaves = [leaf for leaf in find_leaves(all_tensors(result)) if id(leaf) not in piece.given]
            piece.given, piece.reason = None, None
            self._learn(piece, [*leaves, *_buffers_beside(leaves, piece.owner() if piece.owner is not None else None)])
        module = piece.module() if piece.module is not None else None
        if hooked and module is not None and module not in self._hooks:
            self._hooks[module] = module.register_forward_pre_hook(self._before)

    def end(self) -> None:
        """Ends a block."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _learn(self, piece: Piece, tensors: Iterable[torch.Tensor]) -> None:
        piece.tensors.update((id(tensor), tensor) for tensor in tensors)
        for other in self._pieces.values():
            if other.name != piece.name and piece.shares_with(other):
                piece.reason = f"it shares a parameter or a buffer with {other.name!r}"
                other.reason = f"it shares a parameter or a buffer with {piece.name!r}"

    def _before(self, _module: nn.Module, _args: Any) -> None:
        """A module that ran on a lane in this block is called again, perhaps between pieces."""
        if not torch.compiler.is_compiling() and on_user_stream():
            self._executor.settle()


def _buffers_beside(leaves: Iterable[torch.Tensor], owner: nn.Module | None) -> Iterator[torch.Tensor]:
    """Yields the buffers of those modules of a method's owner whose parameters the method uses."""
    used = {id(leaf) for leaf in leaves}
    for module in owner.modules() if owner is not None else ():
        if any(id(parameter) in used for parameter in module._parameters.values()):
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
