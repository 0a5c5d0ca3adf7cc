"""Python's own state of a thread: what of it goes with a call to a lane, and what cannot."""

from __future__ import annotations

import threading
from contextvars import Context

from torch import nn

from mosaic.engine.calls.hidden.outside import places_of
from mosaic.engine.calls.obstacles import Obstacle

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)


def reads_of_thread(module: nn.Module | None) -> Obstacle | None:
    """Returns an obstacle if an attribute of a module's parts, or what their code names, belongs to one thread."""
    parts = [] if module is None else list(module.modules())
    named = [(name, value) for part in parts for name, value in vars(part).items()]
    named += [(place.name, place.value) for place in places_of(parts)]
    for name, value in named:
        if isinstance(value, threading.local):
            return Obstacle(
                f"it reads {name}, a threading.local, whose values a lane's thread does not have",
                todo="use a contextvars.ContextVar, which goes with the call, or an argument",
            )
        if isinstance(value, _LOCKS):
            return Obstacle(
                f"it holds {name}, a lock, for which its lane and its caller would wait for each other",
                todo="take the lock around the model's call",
            )
    return None


def sets_context(before: Context, after: Context) -> Obstacle | None:
    """Returns an obstacle if a call has set a context variable: on a lane it would be set for nobody else."""
    for variable in after:
        if variable not in before or before[variable] is not after[variable]:
            return Obstacle(f"it sets the context variable {variable.name!r}", todo="set it around the module's call")
    return None
