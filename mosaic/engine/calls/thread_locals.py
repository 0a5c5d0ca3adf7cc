"""Python's own state of a thread: what of it goes with a call to a lane, and what cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import Context
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from mosaic.engine.calls.obstacles import Obstacle


def reads_thread_local(module: nn.Module | None) -> Obstacle | None:
    """Returns an obstacle if the code of a module's parts names a ``threading.local``, whose values a lane lacks.

    Looked at are the methods of classes that are not torch's, the globals and closures that these name, and the plain
    attributes of the parts; not the functions that they call.
    """
    seen: set[type] = set()
    for part in () if module is None else module.modules():
        for name, value in vars(part).items():
            if isinstance(value, threading.local):
                return _obstacle(name)
        for kind in type(part).__mro__:
            if kind not in seen and kind.__module__.split(".")[0] not in ("torch", "builtins"):
                seen.add(kind)
                for value in vars(kind).values():
                    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                    if isinstance(function, FunctionType):
                        for name, found in _named_by(function):
                            if isinstance(found, threading.local):
                                return _obstacle(name)
    return None


def _obstacle(name: str) -> Obstacle:
    return Obstacle(
        f"it reads {name}, a threading.local, whose values a lane's thread does not have",
        todo="use a contextvars.ContextVar, which goes with the call, or an argument",
    )


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    todo: list[CodeType] = [function.__code__]
    while todo:
        code = todo.pop()
        for name in code.co_names:
            yield name, function.__globals__.get(name)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled as yet
            continue


def sets_context(before: Context, after: Context) -> Obstacle | None:
    """Returns an obstacle if a call has set a context variable: on a lane it would be set for nobody else."""
    for variable in after:
        if variable not in before or before[variable] is not after[variable]:
            return Obstacle(f"it sets the context variable {variable.name!r}", todo="set it around the module's call")
    return None
