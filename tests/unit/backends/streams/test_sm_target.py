"""The SM targets of libraries: set around launches, put back always."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from mosaic.backends.streams.libraries import (
    Setting,
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


def test_the_target_of_a_handle_of_the_cublas_of_this_process_is_set_and_put_back(cublas: ctypes.CDLL):
    end = Setting(*cublas_calls(cublas, current_cublas_handle(DEVICE))).begin(48)
    assert target_of(cublas) == 48
    end()
    assert target_of(cublas) == 0
