"""Compiling the probe with the NVRTC of this machine, which needs no GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mosaic.backends.cuda.driver import probe as cuda_probe
from mosaic.backends.cuda.probe import compile_probe, nvrtc_version
from mosaic.errors import BackendUnavailableError, CudaError


@pytest.fixture(autouse=True)
def forgotten():
    compile_probe.cache_clear()
    yield
    compile_probe.cache_clear()


@pytest.mark.parametrize("compute_capability", ["8.0", "9.0", "10.0"])
def test_the_probe_is_compiled_to_a_cubin_that_holds_its_kernel(compute_capability: str):
    image = compile_probe(compute_capability)
    assert image.startswith(b"\x7fELF")
    assert b"mosaic_smid" in image


def test_it_is_compiled_once_in_a_process():
    assert compile_probe("9.0") is compile_probe("9.0")


def test_a_device_newer_than_nvrtc_gets_ptx_that_its_driver_compiles():
    image = compile_probe("99.0")
    assert b".entry mosaic_smid" in image
    assert b".target sm_" in image


def test_a_device_that_nvrtc_has_dropped_is_an_error_that_says_what_to_install():
    with pytest.raises(BackendUnavailableError, match=r"compute capability 5\.0.*nvidia-cuda-nvrtc"):
        compile_probe("5.0")


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_probe.cuda, "probe_source", lambda: "this is no CUDA")
    with pytest.raises(CudaError, match="did not compile the SM probe for sm_90") as raised:
        compile_probe("9.0")
    assert raised.value.call == "nvrtcCompileProgram"
    assert "error" in str(raised.value)


def test_the_version_is_told():
    major, minor = nvrtc_version().split(".")
    assert (int(major), int(minor)) >= (12, 0)


def test_without_the_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailableError, match="pip install nvidia-cuda-nvrtc"):
        compile_probe("9.0")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def absent() -> Any:
        raise RuntimeError("Failure finding libnvrtc.so\nmany more lines")

    replace_calls(monkeypatch, nvrtcVersion=absent)
    with pytest.raises(BackendUnavailableError, match=r"Failure finding libnvrtc\.so; needed: .*nvidia-cuda-nvrtc"):
        compile_probe("9.0")


def test_a_failing_call_is_an_error_that_names_call_and_status(monkeypatch: pytest.MonkeyPatch):
    out_of_memory = SimpleNamespace(name="NVRTC_ERROR_OUT_OF_MEMORY")
    replace_calls(monkeypatch, nvrtcCreateProgram=lambda *arguments: (out_of_memory, None))
    with pytest.raises(CudaError) as raised:
        compile_probe("9.0")
    assert (raised.value.call, raised.value.status) == ("nvrtcCreateProgram", "NVRTC_ERROR_OUT_OF_MEMORY")


def replace_calls(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    """Puts calls in the place of the bindings' own."""
    import cuda.bindings
    from cuda.bindings import nvrtc

    changed = ModuleType("nvrtc")
    vars(changed).update({name: value for name, value in vars(nvrtc).items() if not name.startswith("__")} | calls)
    monkeypatch.setattr(cuda.bindings, "nvrtc", changed)
