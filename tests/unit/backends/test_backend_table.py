"""The table of backends: what is missing is named, and a new backend is one file and one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mosaic.backends.cuda import driver as cuda
from mosaic.backends.table import default_backend, open_backend
from mosaic.errors import BackendUnavailableError, CudaError


def installed(*missing: tuple[str, str]) -> cuda.DriverDescription:
    functions = tuple(cuda.MissingFunction(name="cuSomething", since=since, use=use) for use, since in missing)
    return cuda.DriverDescription(version="12.4", missing=functions)


def no_answer() -> Any:
    raise CudaError("no device", call="cuInit", status="CUDA_ERROR_NO_DEVICE")


@pytest.mark.parametrize(
    ("found", "devices", "ordinal", "message"),
    [
        (installed(("streams", "12.5")), lambda: (), 0, r"too old .*found: CUDA 12.4, without cu.*needed: CUDA 12.5"),
        (installed(), no_answer, 0, "does not answer .*found: no device"),
        (installed(), lambda: (), 0, "GPU 0 does not exist.*found: 0 GPUs"),
        (installed(("placement", "13.1")), lambda: (SimpleNamespace(),), 1, "GPU 1 does not exist.*found: 1 GPUs"),
    ],
)
def test_what_a_gpu_lacks_is_named(
    found: Any, devices: Any, ordinal: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cuda, "describe_driver", lambda: found)
    monkeypatch.setattr(cuda, "describe_devices", devices)
    with pytest.raises(BackendUnavailableError, match=message):
        open_backend("cuda", ordinal)


def test_the_host_is_one_device_with_one_kind_of_slot():
    backend = default_backend(torch.device("cpu"))
    assert (backend.name, backend.api) == ("host", None)
    with pytest.raises(ValueError, match="has only device 0"):
        open_backend("host", 1)


def test_what_the_table_does_not_have_is_an_error_that_names_what_it_has():
    with pytest.raises(ValueError, match="unknown backend 'tpu'; choose one of: cuda, host"):
        open_backend("tpu")
    with pytest.raises(TypeError, match="backend=3 is a int; use a backend or a name such as 'host'"):
        open_backend(3)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailableError, match="found: device meta; needed: cuda, cpu"):
        default_backend(torch.device("meta"))
