"""SM targets of libraries during the launches of a lane's work, in its forward and in its backward.

They belong to the process (torch's SM carveout) or to a thread's cuBLAS handle, and autograd launches the backward of a
module later and from a thread of its own. So a module's backward sets them again at its first gradient, and restores
them after its last one, or when the whole backward ends or fails.
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
    """One setting of the process, which several pieces of work may want differently: the latest that runs decides."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get = get
        self._put = put
        self._lock = threading.RLock()
        self._before: Any = None
        self._running: dict[object, Any] = {}

    def begin(self, value: Any) -> Callable[[], None]:
        """Sets it; returns a function that restores the value of the others, or the one before all of them."""
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
    """The SM targets of the lanes of one device: cuBLAS by ``cublasSetSmCountTarget``, one for each handle; cuBLASLt's
    products, torch's CUTLASS kernels and FlashAttention 3 by torch's carveout.

    Results are right whatever holds: a target is a hint, by which libraries may choose other kernels and grids
    (pytorch#183330). That of a node of backward is not promised where other modules' nodes run in between, nor behind
    the first of a module's parameters.

    Raises:
        BackendUnavailableError: An SM target cannot be set here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cublas = loaded_cublas()

    @contextmanager
    def during(self, num_sms: int | None) -> Iterator[None]:
        """Holds inside the block, for launches of the calling thread on a lane with so many SMs (None: all)."""
        with self._begin(num_sms):
            yield

    def begin_backward(self, num_sms: int | None) -> ExitStack:
        """Holds for a module's backward, in the thread that runs it, until the result is closed."""
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
    """Ends a target with its backward: autograd calls it then, or only drops it if the backward failed."""

    def __init__(self, target: ExitStack) -> None:
        self._target = target

    def __call__(self) -> None:
        self._target.close()

    def __del__(self) -> None:
        self()


# One object for each setting of the process: two would restore each other's values.


@cache
def _carveout() -> Setting:
    """The number of SMs that torch leaves to others."""
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
    """The setting of torch's warning about gradients of one weight from several streams, which lanes cause."""
    warns = torch._C._warn_on_accumulate_grad_stream_mismatch  # type: ignore[attr-defined]
    return Setting(warns, torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch)


def current_cublas_handle(device: torch.device) -> int:
    """Returns the handle that the calling thread uses on a device."""
    with torch.cuda.device(device):
        handle: int = torch.cuda.current_blas_handle()
    return handle


@cache
def loaded_cublas(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL:
    """Returns the libcublas among the files that this process has mapped; another copy would not know its handles.

    Raises:
        BackendUnavailableError: None was loaded.
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
