"""Choosing what to measure on: a GPU, or the host for dry runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.backends.host.backend import HostBackend
from mosaic.errors import BackendUnavailableError, CudaError

BackendName = Literal["cuda", "host"]


def open_backend(name: BackendName, ordinal: int = 0, *, cudnn: bool = True) -> Backend:
    """Returns the backend of that name.

    Args:
        name: ``cuda`` or ``host``.
        ordinal: Number of the GPU; 0 on the host.
        cudnn: Whether a GPU's lanes use cuDNN.

    Raises:
        BackendUnavailableError: There is no GPU that can be split; says what is missing.
        ValueError: The host has one device, number 0.
    """
    if name == "host":
        if ordinal != 0:
            raise ValueError(f"device {ordinal} is not there: the host backend has one, 0")
        return HostBackend()
    require_gpu(ordinal)
    backend: Backend = cuda.CudaBackend(ordinal, cudnn=cudnn)
    return backend


def require_gpu(ordinal: int) -> None:
    """Raises BackendUnavailableError unless driver and GPU can do it; whether torch can is for the backend to say."""
    driver = cuda.describe_driver()
    lost = cuda.lost_uses(driver)
    if lost:
        missing = [function for function in driver.missing if function.use in lost]
        newest = max((function.since for function in missing), key=lambda text: tuple(map(int, text.split("."))))
        raise BackendUnavailableError(
            "the CUDA driver is too old to split a GPU", found=f"CUDA {driver.version}", needed=f"CUDA {newest}"
        )
    try:
        count = len(cuda.describe_devices())
    except CudaError as error:
        raise BackendUnavailableError(
            "the CUDA driver does not answer", found=str(error), needed="an NVIDIA GPU, Volta or newer"
        ) from error
    if not 0 <= ordinal < count:
        raise BackendUnavailableError(
            f"there is no GPU number {ordinal}", found=f"{count} GPUs", needed="an NVIDIA GPU, Volta or newer"
        )


def moved(sample: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), sample)


def alternatives(backend: Backend) -> dict[str, Callable[[], Backend]]:
    """Returns the other ways to make slots or partitions on the same device, by name; none on the host."""
    if backend.torch_device.type != "cuda":
        return {}
    ordinal = backend.torch_device.index or 0
    return {
        "fine": lambda: cuda.CudaBackend(ordinal, fine=True),
        "split by sizes": lambda: cuda.CudaBackend(ordinal, placement="split"),
    }
