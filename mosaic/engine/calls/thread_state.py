"""Settings that torch keeps for each thread, so that a lane has to be told them, such as gradient mode and autocast."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from mosaic.find.torch_settings import put_back, read, settings_of

_OF_CALL = settings_of("call")
_NAMES = tuple(setting.name for setting in _OF_CALL)
_GRAD, _CACHE = _NAMES.index("gradient mode"), _NAMES.index("autocast's cache")
_AUTOCASTS = tuple(_NAMES.index(name) for name in ("autocast on cpu", "autocast on cuda") if name in _NAMES)
TRANSFORMED = "it is called inside of a transform of torch.func, such as vmap or grad"


class ThreadState(tuple[Any, ...]):
    """The calling thread's settings, part of what makes two calls the same call."""

    __slots__ = ()

    @property
    def grad(self) -> bool:
        return bool(self[_GRAD])

    @property
    def autocast(self) -> bool:
        return any(self[index] for index in _AUTOCASTS)

    @property
    def autocast_cache(self) -> bool:
        return bool(self[_CACHE])

    @staticmethod
    def capture() -> ThreadState:
        return ThreadState(read(_OF_CALL))


class Applied(ContextDecorator):
    """Switches autocast by its parts: leaving a nested ``torch.autocast`` would clear what all lanes have cast."""

    def __init__(self, state: ThreadState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before = read(_OF_CALL)
        if self._before != self._state:
            put_back(_OF_CALL, self._state)
        torch.autocast_increment_nesting()

    def __exit__(self, *_: object) -> None:
        torch.autocast_decrement_nesting()
        if self._before != read(_OF_CALL):
            put_back(_OF_CALL, self._before)


def forget_cast_weights() -> None:
    """Empties autocast's cache of cast weights where the calling thread is in no autocast, as torch does at its end.

    An autocast in the model's forward ends while lanes fill the cache, which the next step would read. They must rest.
    """
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


@contextmanager
def without_cast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def interception() -> str | None:
    """Returns why a call made now on this thread must run where it is made, or None.

    A lane's thread would escape what watches this thread's operators: a profiler of them, fake tensors, a tracer.
    """
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    is_watched = not all(isinstance(mode, DeviceContext) and mode.device.type == "cpu" for mode in modes)
    if is_watched or torch._C._len_torch_dispatch_stack() > 0 or is_traced():
        return "another torch mode is active"
    if DistributedDataParallel._active_ddp_module is not None:  # its hooks count on the caller's own graph
        return "DistributedDataParallel is around the model"
    if torch.is_anomaly_enabled():  # two threads that record where operators were called can wait for each other
        return "autograd's anomaly detection is on"
    return surrounding()


def surrounding() -> str | None:
    """Returns what a call made now is inside of, where a replay or another thread would compute something else."""
    if torch.is_inference_mode_enabled():
        return "inference mode is active"
    if torch._C._are_functorch_transforms_active():
        return TRANSFORMED
    if forward_ad._current_level >= 0:
        return "it is called where forward-mode derivatives are taken"
    if _has_any_global_hook():
        return "hooks on all modules are registered"
    if parametrize._cache_enabled:
        return "parametrized weights are cached from call to call"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are active, such as activation checkpointing around it"
    if torch._C._current_graph_task_id() != -1:
        return "it is called in the middle of a backward, such as by activation checkpointing"
    return None


def is_traced() -> bool:
    return torch.compiler.is_compiling() or is_exported()


def is_exported() -> bool:
    """Returns True if calls become a graph of the plain model, by ``torch.export`` or ``torch.jit.trace``."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def saved_tensor_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


_HERE = threading.local()
on_lane = partial(getattr, _HERE, "on_lane", False)  # asked up to twenty times in a step, so in C
become_lane = partial(setattr, _HERE, "on_lane", True)  # for good; a lane's thread runs nothing else


def on_user_stream() -> bool:
    """Returns True if the current stream is the user's own: this is neither work on a lane nor part of a backward."""
    return torch._C._current_graph_task_id() == -1 and not on_lane()


class AsLane:
    def __enter__(self) -> None:
        self._before, _HERE.on_lane = on_lane(), True

    def __exit__(self, *_: object) -> None:
        _HERE.on_lane = self._before
