"""SM targets of libraries during the launches of a lane's work, in forward and backward.

They belong to the process (torch's SM carveout) or to a thread's cuBLAS handle, but autograd launches a module's
backward later from its own thread. So a module's backward sets them again at its first gradient, and restores them
after its last one, or when the whole backward ends or fails.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from mosaic.errors import BackendUnavailableError, CudaError


class Setting:
    """A setting of the process with several requesters; the latest active one decides."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get = get
        self._put = put
        self._lock = threading.RLock()
        self._before: Any = None
        self._running: dict[object, Any] = {}

    def begin(self, value: Any) -> Callable[[], None]:
        """Sets it; returns a function that restores the value of the other requesters, or the original one."""
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
    """SM targets of one device's lanes: ``cublasSetSmCountTarget`` per cuBLAS handle, and torch's carveout for
    cuBLASLt's products, torch's CUTLASS kernels and FlashAttention 3.

    A target is a hint for the choice of kernels and grids (pytorch#183330), so results are correct with any target. In
    backward it is not guaranteed if nodes of other modules run in between, nor after the gradient of a module's first
    parameter.

    Raises:
        BackendUnavailableError: An SM target cannot be set here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cublas = loaded_cublas()

    @contextmanager
    def during(self, num_sms: int | None) -> Iterator[None]:
        """Returns a context for launches of the calling thread on a lane with this number of SMs (None: all)."""
        with self._begin(num_sms):
            yield

    def begin_backward(self, num_sms: int | None) -> ExitStack:
        """Sets the target for a module's backward, in its thread, until the result is closed."""
        target = self._begin(num_sms)
        torch.autograd.Variable._execution_engine.queue_callback(_Guard(target))  # type: ignore[attr-defined]
        return target

    def _begin(self, num_sms: int | None) -> ExitStack:
        with ExitStack() as target:
            if num_sms is not None:
                total = torch.cuda.get_device_properties(self._device).multi_processor_count
                target.callback(_carveout().begin(total - num_sms))
                handle = current_cublas_handle(self._device)
                target.callback(_cublas_target(self._cublas, handle).begin(num_sms))
            return target.pop_all()


class _Guard:
    """Ends a target with its backward: autograd calls it, or frees it if the backward failed."""

    def __init__(self, target: ExitStack) -> None:
        self._target = target

    def __call__(self) -> None:
        self._target.close()

    def __del__(self) -> None:
        self()


# one object per setting of the process: two would restore each other's values


@cache
def _carveout() -> Setting:
    """Torch's SM carveout."""
    return Setting(torch._C._get_sm_carveout_experimental, torch._C._set_sm_carveout_experimental)


@cache
def _cublas_target(cublas: Any, handle: int) -> Setting:
    """The SM target of a cuBLAS handle."""

    def get() -> int:
        target = ctypes.c_int(0)
        _check("cublasGetSmCountTarget", cublas.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(target)))
        return target.value

    def put(num_sms: int) -> None:
        status = cublas.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(num_sms))
        _check("cublasSetSmCountTarget", status)

    return Setting(get, put)


@cache
def accumulation_warning() -> Setting:
    """Torch's warning about gradients of one weight from several streams, which lanes cause."""
    warns = torch._C._warn_on_accumulate_grad_stream_mismatch  # type: ignore[attr-defined]
    return Setting(warns, torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch)


def current_cublas_handle(device: torch.device) -> int:
    """Returns the calling thread's cuBLAS handle on a device."""
    with torch.cuda.device(device):
        handle: int = torch.cuda.current_blas_handle()
    return handle


@cache
def loaded_cublas(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL:
    """Returns the libcublas mapped into this process; another copy cannot use its handles.

    Raises:
        BackendUnavailableError: It is not loaded.
    """
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcublas.so"):
            return ctypes.CDLL(path)
    raise BackendUnavailableError(
        "the SM target of cuBLAS cannot be set",
        found="no libcublas in this process",
        needed="torch built for CUDA, with a matrix product run before",
    )


def _check(call: str, status: int) -> None:
    if status != 0:
        raise CudaError(f"{call} failed with status {status}", call=call, status=str(status))
