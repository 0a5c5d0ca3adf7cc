"""The one table of backends: name, what makes it, whose modules it runs; what it can do its lanes declare.

A new backend is a file with a class that derives from ``mosaic.backends.base.Backend``, and a line here. Importing the
table loads neither torch nor a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from mosaic.errors import unknown

if TYPE_CHECKING:
    import torch

    from mosaic.backends.base import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """One backend."""

    make: Callable[[int], Backend]
    """Opens the device of a number; says what is missing where it cannot."""
    torch_type: str
    """Type of the torch devices whose tensors its modules take. The first backend of a type is its default."""


def _host(ordinal: int) -> Backend:
    from mosaic.backends.host import HostBackend

    if ordinal != 0:
        raise ValueError(f"device {ordinal} is not there: the host backend has one, 0")
    return HostBackend()


def _cuda(ordinal: int) -> Backend:
    from mosaic.backends.cuda.backend import CudaBackend

    return CudaBackend(ordinal)


BACKENDS: Mapping[str, BackendKind] = MappingProxyType(
    {
        "cuda": BackendKind(make=_cuda, torch_type="cuda"),
        "host": BackendKind(make=_host, torch_type="cpu"),
    }
)
"""Every backend by name."""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]
"""A name of the table, as the command line offers them."""


def open_backend(name: str, ordinal: int = 0) -> Backend:
    """Returns the backend of a name on one device.

    Args:
        name: A name of the table, with the device's number or without: ``cuda:1``.
        ordinal: The device's number where the name has none.

    Raises:
        BackendUnavailableError: The device, or what it needs, is not there.
        ValueError: There is no such backend, or the host was asked for another device than 0.
    """
    kind, colon, number = name.partition(":")
    if kind not in BACKENDS or (colon and not number.isdecimal()):
        raise ValueError(f"{unknown('backend', name, BACKENDS)}, or cuda:1 for the second GPU")
    return BACKENDS[kind].make(int(number) if colon else ordinal)


def present_backend() -> str:
    """Returns the name of the GPU's backend where torch sees a GPU, and of the host's otherwise."""
    import torch

    return "cuda" if torch.cuda.is_available() else "host"


def default_backend(device: torch.device) -> Backend:
    """Returns the backend for modules that live on a torch device.

    Raises:
        BackendUnavailableError: No backend runs there, or what it needs is not there.
    """
    from mosaic.errors import BackendUnavailableError

    name = next((name for name, kind in BACKENDS.items() if kind.torch_type == device.type), None)
    if name is None:
        offered = ", ".join(kind.torch_type for kind in BACKENDS.values())
        raise BackendUnavailableError("no backend runs modules there", found=f"device {device}", needed=offered)
    return open_backend(name, device.index or 0)
