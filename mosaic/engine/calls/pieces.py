"""Pieces of work that ``mosaic.parallel`` is given: functions with their arguments, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any, Protocol, TypeAlias

from torch import nn

Piece: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function with its arguments and named arguments."""


class PiecePool(Protocol):
    """Lanes that are open for a block's names, and what is known of their calls."""

    def begin(self) -> None:
        """Opens a block."""

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one piece of work on the lane of its name."""

    def call_all(self, calls: Mapping[str, Piece]) -> dict[str, Any]:
        """Runs pieces of work side by side."""

    def end(self, *, failed: bool) -> None:
        """Closes a block, in which an error may have been raised; joins everything."""


def piece_of(name: str, call: Sequence[Any]) -> Piece:
    """Takes ``(function, arguments)`` or ``(function, arguments, named arguments)`` apart.

    Raises:
        TypeError: It is neither.
    """
    if not 2 <= len(call) <= 3 or not callable(call[0]):
        raise TypeError(f"{name!r} is not (function, arguments) or (function, arguments, named arguments)")
    return call[0], tuple(call[1]), dict(call[2]) if len(call) == 3 else {}


def owner_of(function: Callable[..., Any]) -> nn.Module | None:
    """Returns the module whose call or method a function is."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def identity_of(function: Callable[..., Any]) -> Hashable:
    """Returns what tells functions apart, and stays the same for a lambda that is made anew each step."""
    plain = getattr(function, "__func__", function)
    code: Hashable = getattr(plain, "__code__", None)
    if code is not None:
        return code
    return id(plain) if isinstance(plain, BuiltinFunctionType) else id(type(plain))
