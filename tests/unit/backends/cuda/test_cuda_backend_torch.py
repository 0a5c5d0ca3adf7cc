"""Torch and the driver have to mean the same device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_streams import FakeGreenDriver

from mosaic.backends.cuda import backend as cuda_backend
from mosaic.backends.cuda.driver import CudaDevice
from mosaic.errors import BackendUnavailableError


class Torch:
    """As much of ``torch.cuda`` as is asked about devices."""

    def __init__(self, *, is_there: bool = True, uuids: tuple[str, ...] = ("1",)) -> None:
        self._is_there = is_there
        self._uuids = uuids

    def is_available(self) -> bool:
        return self._is_there

    def device_count(self) -> int:
        return len(self._uuids)

    def get_device_properties(self, ordinal: int) -> Any:
        return type("Properties", (), {"uuid": self._uuids[ordinal]} if self._uuids[ordinal] else {})()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Torch(is_there=False), "torch cannot use the GPU"),
        (Torch(uuids=("1",)), "torch does not see device 1"),
        (Torch(uuids=("1", "3")), "another one than the driver's.*found: GPU-3 in torch; needed: GPU-2"),
    ],
)
def test_torch_must_have_the_drivers_device_under_its_number(
    monkeypatch: pytest.MonkeyPatch, found: Torch, message: str
):
    monkeypatch.setattr(cuda_backend.torch, "cuda", found)
    with pytest.raises(BackendUnavailableError, match=message):
        cuda_backend.check_torch(device(1, "GPU-2"))


@pytest.mark.parametrize("uuid", ["2", "GPU-2", ""])
def test_a_torch_that_agrees_or_does_not_tell_is_fine(monkeypatch: pytest.MonkeyPatch, uuid: str):
    monkeypatch.setattr(cuda_backend.torch, "cuda", Torch(uuids=("1", uuid)))
    cuda_backend.check_torch(device(1, "GPU-2"))


def test_torchs_autograd_is_started_where_a_backend_opens(monkeypatch: pytest.MonkeyPatch):
    started: list[torch.device] = []
    monkeypatch.setattr(cuda_backend, "check_torch", lambda _: None)
    monkeypatch.setattr(cuda_backend, "start_autograd", started.append)
    cuda_backend.CudaBackend(1, driver=FakeGreenDriver())
    assert started == [torch.device("cuda", 1)]


def device(ordinal: int, uuid: str) -> CudaDevice:
    return CudaDevice(
        ordinal=ordinal, name="GPU", uuid=uuid, compute_capability="9.0", num_sms=132, total_memory_bytes=1
    )
