"""Settings of libraries that hold while work of a lane is launched, in its forward and in its backward.

They belong to the process (torch's SM carveout, its cuDNN switches) or to a thread's cuBLAS handle, and autograd
launches the backward of a module later and from a thread of its own. So a module's backward sets them anew where its
first gradient comes, and puts them back where its last one has come, or where the whole backward ends or fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch

from mosaic.backends.streams.sm_target import (
    carveout_calls,
    carveout_for,
    cublas_calls,
    current_cublas_handle,
    loaded_cublas,
)


class Setting:
    """One setting, which several pieces of work may want otherwise: the latest that runs has its way.

    Args:
        get: Reads it.
        put: Writes it.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get = get
        self._put = put
        self._lock = threading.RLock()
        self._before: Any = None
        self._running: dict[object, Any] = {}

    def begin(self, value: Any) -> Callable[[], None]:
        """Sets it; returns what ends that, after which it is as the others want it, or as it was before all of them."""
        key = object()
        with self._lock:
            if not self._running:
                self._before = self._get()
            self._put(value)
            self._running[key] = value
        return partial(self._end, key)

    def _end(self, key: object) -> None:
        with self._lock:
            if key in self._running:
                del self._running[key]
                self._put([self._before, *self._running.values()][-1])


class LibrarySettings:
    """What libraries are told of the lanes of one device.

    Results are right whatever holds: a setting of SMs changes grids, and without cuDNN torch has kernels of its own.
    Not promised is the SM target of a node of backward at whose time other modules' nodes run in between, nor that of
    a module's nodes behind the first of its parameters.

    Args:
        device: The device.
        sm_target: Tell cuBLAS, and what else goes by torch's carveout, how many SMs a lane has.
        cudnn: Let torch use cuDNN on lanes. A backward does without it from the first module that is on a lane to its
            end: a convolution's backward chooses its kernels when it runs.

    Raises:
        BackendUnavailableError: An SM target cannot be set here.
    """

    def __init__(self, device: torch.device, *, sm_target: bool = False, cudnn: bool = True) -> None:
        self._device = device
        self._cublas = loaded_cublas() if sm_target else None
        self._carveout = _carveout() if sm_target else None
        self._cudnn = () if cudnn else _cudnn()

    @contextmanager
    def during(self, num_sms: int | None) -> Iterator[None]:
        """Holds them inside the block, for launches of the calling thread on a lane with so many SMs (None: all)."""
        with self._begin_target(num_sms), self._begin_cudnn():
            if self._cudnn and torch._C._current_graph_task_id() != -1:  # a recomputation: its backward comes unseen
                _end_with_backward(self._begin_cudnn())
            yield

    def begin_backward(self, num_sms: int | None) -> ExitStack:
        """Holds them for a module's backward, in the thread that runs it; closing the result ends the SM target."""
        target = self._begin_target(num_sms)
        _end_with_backward(target, self._begin_cudnn())
        return target

    def _begin_target(self, num_sms: int | None) -> ExitStack:
        with ExitStack() as target:
            if self._carveout is not None and num_sms is not None:
                target.callback(self._carveout.begin(carveout_for(num_sms, self._device)))
                handle = current_cublas_handle(self._device)
                target.callback(_cublas_target(self._cublas, handle).begin(num_sms))
            return target.pop_all()

    def _begin_cudnn(self) -> ExitStack:
        without = ExitStack()
        for setting in self._cudnn:
            without.callback(setting.begin(False))
        return without


class _Guard:
    """Ends what holds until a backward ends: autograd calls it then, or only lets go of it if the backward failed."""

    def __init__(self, *held: ExitStack) -> None:
        self._held = held

    def __call__(self) -> None:
        for stack in self._held:
            stack.close()

    def __del__(self) -> None:
        self()


def _end_with_backward(*held: ExitStack) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(_Guard(*held))  # type: ignore[attr-defined]


# Each is one for the process, as what it sets is: of two that took turns, either would put back what the other set.


@cache
def _carveout() -> Setting:
    return Setting(*carveout_calls())


@cache
def _cublas_target(cublas: Any, handle: int) -> Setting:
    return Setting(*cublas_calls(cublas, handle))


@cache
def _cudnn() -> tuple[Setting, ...]:
    return (
        Setting(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
        Setting(torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),  # not covered by the first
    )
