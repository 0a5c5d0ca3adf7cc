"""Telling libraries for how many SMs to size their grids, since they would ask the device and hear of all of them.

Whether it pays has to be measured. Results stay right without it: a kernel whose grid is too large for its partition
takes a partial wave more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mosaic.errors import BackendUnavailableError, CudaError

PAYS: frozenset[str] = frozenset()
"""Names of the devices on which ``bench.gpu.__main__`` measured that targets make partitions faster; none was measured yet."""


def pays(device_name: str) -> bool:
    """Whether targets were measured to pay on a device; what ``sm_target="auto"`` goes by."""
    return device_name in PAYS


@contextmanager
def sm_target(num_sms: int | None, device: torch.device) -> Iterator[None]:
    """Makes torch size its matrix products for ``num_sms`` SMs inside the block (``_set_sm_carveout_experimental``).

    It reaches cuBLASLt's products, torch's own CUTLASS kernels and FlashAttention 3, and Inductor when it compiles. The
    setting is one for the whole process: use it from one thread, around launches, not around waiting. Autograd launches
    backward later and from another thread, outside of the block (``LibrarySettings`` has the setting follow it); a
    backward that is captured inside the block, as stage graphs do, keeps the target in its graph.

    Args:
        num_sms: SMs of the partition; None changes nothing.
        device: The partition's device.

    Raises:
        BackendUnavailableError: This torch has no such setting.
        ValueError: The device has fewer SMs, or ``num_sms`` is not positive.
    """
    if num_sms is None:
        yield
        return
    get, put = carveout_calls()
    carveout = carveout_for(num_sms, device)
    before = get()
    put(carveout)
    try:
        yield
    finally:
        put(before)


def carveout_calls() -> tuple[Callable[[], int | None], Callable[[int | None], None]]:
    """Returns what reads and what writes the number of SMs that torch leaves to others.

    Raises:
        BackendUnavailableError: This torch has no such setting.
    """
    get: Callable[[], int | None] | None = getattr(torch._C, "_get_sm_carveout_experimental", None)
    put: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if get is None or put is None:
        raise BackendUnavailableError(
            "the SM target of torch's matrix products cannot be set",
            found=f"torch {torch.__version__} without _set_sm_carveout_experimental",
            needed="torch 2.7 or newer, built for CUDA; or run without an SM target",
        )
    return get, put


def carveout_for(num_sms: int, device: torch.device) -> int:
    """Returns how many SMs of a device a partition of ``num_sms`` leaves to others.

    Raises:
        ValueError: The device has fewer SMs, or ``num_sms`` is not positive.
    """
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 < num_sms <= total:
        raise ValueError(f"num_sms={num_sms} is not between 1 and the {total} SMs of {device}")
    return total - num_sms


@contextmanager
def cublas_sm_target(num_sms: int | None, device: torch.device, *, library: Any = None) -> Iterator[None]:
    """Makes cuBLAS size its grids for ``num_sms`` SMs inside the block (``cublasSetSmCountTarget``).

    It reaches plain cuBLAS products, which the carveout does not. Handles belong to threads: this covers launches of
    the calling thread only, not those of autograd's thread, whether or not they are captured.

    Args:
        num_sms: SMs of the partition; None changes nothing.
        device: The partition's device.
        library: The loaded libcublas; found among the libraries of this process by default.

    Raises:
        BackendUnavailableError: cuBLAS is not loaded, or too old.
        CudaError: cuBLAS refused the number.
    """
    if num_sms is None:
        yield
        return
    get, put = cublas_calls(library if library is not None else loaded_cublas(), current_cublas_handle(device))
    before = get()
    put(num_sms)
    try:
        yield
    finally:
        put(before)


def cublas_calls(library: Any, handle: int) -> tuple[Callable[[], int], Callable[[int], None]]:
    """Returns what reads and what writes the SM target of a cuBLAS handle.

    Raises:
        BackendUnavailableError: cuBLAS is too old.
    """
    if not hasattr(library, "cublasSetSmCountTarget"):
        raise BackendUnavailableError(
            "the SM target of cuBLAS cannot be set", found="a cuBLAS without cublasSetSmCountTarget", needed="CUDA 11.5"
        )

    def get() -> int:
        found = ctypes.c_int(0)
        _check("cublasGetSmCountTarget", library.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(found)))
        return found.value

    def put(num_sms: int) -> None:
        _check(
            "cublasSetSmCountTarget",
            library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(num_sms)),
        )

    return get, put


def current_cublas_handle(device: torch.device) -> int:
    """Returns the handle that the calling thread uses on a device."""
    with torch.cuda.device(device):
        handle: int = torch.cuda.current_blas_handle()
    return handle


@cache
def loaded_cublas() -> ctypes.CDLL:
    """Returns the libcublas that torch loaded; another copy would not know its handles.

    Raises:
        BackendUnavailableError: None was loaded.
    """
    maps = Path("/proc/self/maps")
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
