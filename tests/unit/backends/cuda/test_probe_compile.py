"""Compiling the probe with the NVRTC of this machine, which needs no GPU."""

from __future__ import annotations

import sys

import pytest

from mosaic.backends.cuda.driver import probe_source
from mosaic.backends.cuda.probe import compile_probe
from mosaic.errors import BackendUnavailableError, CudaError

SOURCE = probe_source()


@pytest.fixture(autouse=True)
def forgotten():
    compile_probe.cache_clear()
    yield
    compile_probe.cache_clear()


@pytest.mark.parametrize("compute_capability", ["9.0", "10.0"])
def test_the_probe_is_compiled_to_a_cubin_that_holds_its_kernel(compute_capability: str):
    image = compile_probe(compute_capability, SOURCE)
    assert image.startswith(b"\x7fELF")
    assert b"mosaic_smid" in image


def test_a_device_newer_than_nvrtc_gets_ptx_that_its_driver_compiles():
    image = compile_probe("99.0", SOURCE)
    assert b".entry mosaic_smid" in image
    assert b".target sm_" in image


def test_a_device_that_nvrtc_has_dropped_is_an_error_that_says_what_to_install():
    with pytest.raises(BackendUnavailableError, match=r"compute capability 5\.0.*nvidia-cuda-nvrtc"):
        compile_probe("5.0", SOURCE)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words():
    with pytest.raises(CudaError, match="did not compile the SM probe for sm_90") as raised:
        compile_probe("9.0", "this is no CUDA")
    assert raised.value.call == "nvrtcCompileProgram"
    assert "error" in str(raised.value)


def test_without_the_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailableError, match="pip install nvidia-cuda-nvrtc"):
        compile_probe("9.0", SOURCE)
