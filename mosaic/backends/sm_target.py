"""Telling libraries for how many SMs to size their grids, since they would ask the device and hear of all of them.

Whether it pays has to be measured. Results stay right without it: a kernel whose grid is too large for its partition
takes a partial wave more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mosaic.errors import BackendUnavailableError, CudaError


@contextmanager
def sm_target(num_sms: int | None, device: torch.device) -> Iterator[None]:
    """Makes torch size its matrix products for ``num_sms`` SMs inside the block (``_set_sm_carveout_experimental``).

    It reaches cuBLASLt's products, torch's own CUTLASS kernels and FlashAttention 3, and Inductor when it compiles. The
    setting is one for the whole process: use it from one thread, around launches, not around waiting. Autograd launches
    backward later and from another thread, outside of the block; a backward that is captured inside the block, as stage
    graphs do, keeps the target in its graph.

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
    get: Callable[[], int | None] | None = getattr(torch._C, "_get_sm_carveout_experimental", None)
    put: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if get is None or put is None:
        raise BackendUnavailableError(
            "the SM target of torch's matrix products cannot be set",
            found=f"torch {torch.__version__} without _set_sm_carveout_experimental",
            needed="torch 2.7 or newer, built for CUDA; or run without an SM target",
        )
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 < num_sms <= total:
        raise ValueError(f"num_sms={num_sms} is not between 1 and the {total} SMs of {device}")
    before = get()
    put(total - num_sms)
    try:
        yield
    finally:
        put(before)


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
    cublas = library if library is not None else _loaded_cublas()
    if not hasattr(cublas, "cublasSetSmCountTarget"):
        raise BackendUnavailableError(
            "the SM target of cuBLAS cannot be set", found="a cuBLAS without cublasSetSmCountTarget", needed="CUDA 11.5"
        )
    with torch.cuda.device(device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    before = ctypes.c_int(0)
    _check("cublasGetSmCountTarget", cublas.cublasGetSmCountTarget(handle, ctypes.byref(before)))
    _check("cublasSetSmCountTarget", cublas.cublasSetSmCountTarget(handle, ctypes.c_int(num_sms)))
    try:
        yield
    finally:
        _check("cublasSetSmCountTarget", cublas.cublasSetSmCountTarget(handle, before))


def _loaded_cublas() -> ctypes.CDLL:
    """Returns the libcublas that torch loaded; another copy would not know its handles."""
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
