"""Choosing a device, and the ways of sharing it that depend on torch's version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mosaic.backends.cuda.driver import driver as cuda
from mosaic.backends.host.backend import HostBackend
from mosaic.errors import BackendUnavailableError, CudaError
from mosaic.microbench.devices import alternatives, moved, open_backend
from mosaic.microbench.sharing import variants
from mosaic.microbench.sharing.variants import open_variant


def driver(*missing: tuple[str, str]) -> Any:
    functions = tuple(cuda.MissingFunction(name="cuSomething", since=since, use=use) for use, since in missing)
    return cuda.DriverDescription(version="12.4", missing=functions)


def no_answer() -> Any:
    raise CudaError("no device", call="cuInit", status="CUDA_ERROR_NO_DEVICE")


@pytest.mark.parametrize(
    ("found", "devices", "ordinal", "message"),
    [
        (driver(("streams", "12.5")), lambda: (), 0, r"too old .*found: CUDA 12.4; needed: CUDA 12.5"),
        (driver(), no_answer, 0, "does not answer .*found: no device"),
        (driver(), lambda: (), 0, "no GPU number 0 .*found: 0 GPUs"),
        (driver(("placement", "13.1")), lambda: (SimpleNamespace(),), 1, "no GPU number 1 .*found: 1 GPUs"),
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
    backend = open_backend("host")
    assert backend.name == "host"
    assert alternatives(backend) == {}
    with pytest.raises(ValueError, match="has one, 0"):
        open_backend("host", 1)


def test_a_batch_is_moved_whole():
    sample = {"x": [torch.ones(1), 3], "y": (torch.ones(2),)}
    there = moved(sample, torch.device("meta"))
    assert there["x"][0].device.type == there["y"][0].device.type == "meta"
    assert there["x"][1] == 3


@pytest.mark.parametrize("kind", ["plain", "prioritised", "torch_contexts"])
def test_what_the_host_has_not_says_why(kind: str):
    with pytest.raises(BackendUnavailableError, match="cannot be had"):
        open_variant(kind, HostBackend(num_slots=2), (1, 1))


class Context:
    def __init__(self, *, num_sms: int = 0, sm_partition: Any = None, device_id: int | None = None) -> None:
        self.num_sms = num_sms or sm_partition

    @classmethod
    def create(cls, *, num_sms: int, device_id: int) -> Context:
        return cls(num_sms=num_sms)

    def Stream(self) -> int:  # noqa: N802
        return self.num_sms


class Splits:
    """Torch's partition where its driver may be too old."""

    works = True

    @classmethod
    def from_device(cls, device_id: int) -> Splits:
        return cls()

    def split(self, *, num_sms: list[int]) -> tuple[tuple[int, ...], None]:
        if not self.works:
            raise RuntimeError("needs 13.1")
        return tuple(num_sms), None


def test_torch_splits_where_it_can_and_otherwise_the_overlap_is_named(monkeypatch: pytest.MonkeyPatch):
    split = variants._split_by_torch
    contexts, note = split(SimpleNamespace(GreenContext=Context), (64, 68), 0)
    assert [context.num_sms for context in contexts] == [64, 68]
    assert "OVERLAP" in note
    newer = SimpleNamespace(GreenContext=Context, SMPartition=Splits)
    contexts, note = split(newer, (64, 68), 0)
    assert [context.num_sms for context in contexts] == [64, 68]
    assert "disjoint" in note
    monkeypatch.setattr(Splits, "works", False)
    _, note = split(newer, (64, 68), 0)
    assert "needs 13.1" in note
    assert "OVERLAP" in note


def test_a_torch_that_makes_no_context_is_a_reason():
    def refuse(**options: Any) -> None:
        raise RuntimeError("no green contexts today")

    with pytest.raises(BackendUnavailableError, match="no green contexts today"):
        variants._split_by_torch(SimpleNamespace(GreenContext=SimpleNamespace(create=refuse)), (8, 8), 0)
