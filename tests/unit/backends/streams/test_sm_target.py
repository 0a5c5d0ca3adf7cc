"""The SM targets of libraries: set around launches, put back always."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mosaic.backends.streams.libraries import (
    Setting,
    carveout_calls,
    carveout_for,
    cublas_calls,
    current_cublas_handle,
    loaded_cublas,
)

DEVICE = torch.device("cuda", 0)

CUBLAS = """
static int target = 0;
extern "C" int cublasGetSmCountTarget(void *handle, int *value) { *value = target; return handle ? 0 : 1; }
extern "C" int cublasSetSmCountTarget(void *handle, int value) {
    if (!handle) return 1;
    if (value > 132) return 7;
    target = value;
    return 0;
}
"""


class Carveout:
    """torch's process-global setting."""

    def __init__(self) -> None:
        self.value: int | None = None
        self.seen: list[int | None] = []

    def get(self) -> int | None:
        return self.value

    def put(self, value: int | None) -> None:
        self.value = value
        self.seen.append(value)


@pytest.fixture
def carveout(monkeypatch: pytest.MonkeyPatch) -> Carveout:
    fake = Carveout()
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", fake.get)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", fake.put)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return fake


@pytest.fixture(scope="module")
def built_cublas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cublas")
    source, library = folder / "cublas.cpp", folder / "libcublas.so.13"
    source.write_text(CUBLAS, encoding="utf-8")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=120)
    return library


@pytest.fixture
def cublas(built_cublas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The stand-in, as what torch loaded: a CUDA build of torch has the real one, which must not get this handle."""
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 4096)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    maps = tmp_path / "maps"
    maps.write_text(f"7f0000000000-7f0000001000 r-xp 00000000 08:01 42    {built_cublas}\n", encoding="utf-8")
    return loaded_cublas(maps)


def target_of(library: ctypes.CDLL) -> int:
    value = ctypes.c_int(0)
    library.cublasGetSmCountTarget(ctypes.c_void_p(4096), ctypes.byref(value))
    return value.value


def test_the_carveout_is_what_the_partition_leaves_of_the_device_and_is_put_back(carveout: Carveout):
    setting = Setting(*carveout_calls())
    end = setting.begin(carveout_for(48, DEVICE))
    assert carveout.value == 84
    end_inner = setting.begin(carveout_for(132, DEVICE))
    assert carveout.value == 0
    end_inner()
    assert carveout.value == 84
    end()
    assert carveout.value is None


@pytest.mark.parametrize("num_sms", [0, 133])
def test_a_target_that_the_device_does_not_have_is_refused(carveout: Carveout, num_sms: int):
    with pytest.raises(ValueError, match=f"num_sms={num_sms} is not between 1 and the 132 SMs"):
        carveout_for(num_sms, DEVICE)


def test_the_target_of_a_handle_of_the_cublas_of_this_process_is_set_and_put_back(cublas: ctypes.CDLL):
    end = Setting(*cublas_calls(cublas, current_cublas_handle(DEVICE))).begin(48)
    assert target_of(cublas) == 48
    end()
    assert target_of(cublas) == 0
