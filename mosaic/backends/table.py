"""The table of backends.

To add a backend, write a package with a class derived from ``mosaic.backends.base.Backend``, and add a line here.
Importing the table loads neither torch nor a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from mosaic.errors import BackendUnavailableError, unknown

if TYPE_CHECKING:
    import torch

    from mosaic.backends.base import Backend


def _host(ordinal: int) -> Backend:
    from mosaic.backends.host import HostBackend

    if ordinal != 0:
        raise ValueError(f"device {ordinal} does not exist; the host backend has only device 0")
    return HostBackend()


def _cuda(ordinal: int) -> Backend:
    from mosaic.backends.cuda.backend import CudaBackend

    return CudaBackend(ordinal)


BACKENDS: Mapping[str, Callable[[int], Backend]] = MappingProxyType({"cuda": _cuda, "host": _host})
"""Functions that open a device, by backend name."""
TORCH_TYPES: Mapping[str, str] = MappingProxyType({"cuda": "cuda", "cpu": "host"})
"""Default backends by type of torch device."""


def open_backend(name: Backend | str, ordinal: int = 0) -> Backend:
    """Returns the backend of a name on one device.

    Args:
        name: A name of the table, with or without the device's number (``cuda:1``); or a backend, which is returned.
        ordinal: The device's number if the name has none.

    Raises:
        BackendUnavailableError: The device or its requirements are missing.
        ValueError: The name is unknown, or a host device other than 0 is requested.
        TypeError: ``name`` is neither a backend nor a name.
    """
    if not isinstance(name, str):
        if not hasattr(name, "open_lanes"):
            raise TypeError(f"backend={name!r} is a {type(name).__name__}; use a backend or a name such as 'host'")
        return name
    kind, colon, number = name.partition(":")
    if kind not in BACKENDS or (colon and not number.isdecimal()):
        raise ValueError(f"{unknown('backend', name, BACKENDS)}, or cuda:1 for the second GPU")
    return BACKENDS[kind](int(number) if colon else ordinal)


def present_backend() -> str:
    """Returns the name of the GPU's backend if torch sees a GPU, otherwise of the host's."""
    import torch

    return "cuda" if torch.cuda.is_available() else "host"


def default_backend(device: torch.device) -> Backend:
    """Returns the backend for modules on a torch device.

    Raises:
        BackendUnavailableError: No backend runs there, or its requirements are missing.
    """
    if device.type not in TORCH_TYPES:
        raise BackendUnavailableError(
            "no backend runs modules there", found=f"device {device}", needed=", ".join(TORCH_TYPES)
        )
    return open_backend(TORCH_TYPES[device.type], device.index or 0)
