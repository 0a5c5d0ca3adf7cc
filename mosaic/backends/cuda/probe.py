"""Compiles the probe, the kernel that records the SMs of a stream, with NVRTC.

cuda-python finds NVRTC in CUDA builds of torch, in the package ``nvidia-cuda-nvrtc`` or in the CUDA toolkit. Compiling
takes about 50 ms and needs no GPU.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from mosaic.errors import BackendUnavailableError, CudaError

_NEEDED = "cuda-python 12.8 or newer and NVRTC: `pip install nvidia-cuda-nvrtc`, or a CUDA build of torch"


@functools.cache
def compile_probe(compute_capability: str, source: str) -> bytes:
    """Compiles the probe for a device, once per process: to a cubin, or to PTX if NVRTC is older than the device.

    Raises:
        BackendUnavailableError: NVRTC is missing, or does not support this device.
        CudaError: NVRTC failed.
    """
    nvrtc = _nvrtc()
    target = int(compute_capability.replace(".", ""))
    supported = [int(arch) for arch in _call(nvrtc, "nvrtcGetSupportedArchs")]
    if target in supported:
        return _compile(nvrtc, source, f"sm_{target}", "CUBIN")
    older = [arch for arch in supported if arch < target]
    if not older:
        raise BackendUnavailableError(
            f"NVRTC {nvrtc_version()} cannot compile for compute capability {compute_capability}",
            found=f"an NVRTC for {_listed(supported)}",
            needed="an older nvidia-cuda-nvrtc, such as 12.9, for older devices",
        )
    return _compile(nvrtc, source, f"compute_{max(older)}", "PTX")


def nvrtc_version() -> str:
    """Returns NVRTC's version, such as ``13.0``; raises BackendUnavailableError without it."""
    return ".".join(map(str, _call_all(_nvrtc(), "nvrtcVersion")))


def _nvrtc() -> ModuleType:
    """Imports NVRTC's bindings and checks for the library itself."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BackendUnavailableError("the SM probe cannot be compiled", found=str(error), needed=_NEEDED) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # also cuda.pathfinder's DynamicLibNotFoundError
        lines = str(error).strip().splitlines() or ["no libnvrtc"]
        raise BackendUnavailableError("the SM probe cannot be compiled", found=lines[0], needed=_NEEDED) from error
    bindings: ModuleType = nvrtc
    return bindings


def _compile(nvrtc: ModuleType, source: str, architecture: str, form: str) -> bytes:
    program = _call(nvrtc, "nvrtcCreateProgram", source.encode(), b"mosaic_smid.cu", 0, [], [])
    try:
        options = [f"--gpu-architecture={architecture}".encode()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            raise CudaError(
                f"NVRTC did not compile the SM probe for {architecture}: {status.name}, {log}",
                call="nvrtcCompileProgram",
                status=status.name,
            )
        return _read(nvrtc, program, form)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: ModuleType, program: Any, kind: str) -> bytes:
    size: int = _call(nvrtc, f"nvrtcGet{kind}Size", program)
    if size <= 1:  # an empty string; Python shares bytes objects of length one, which must not be written
        return b""
    text = bytes(size)  # the bindings fill it in place
    _call_all(nvrtc, f"nvrtcGet{kind}", program, text)
    return text


def _call(nvrtc: ModuleType, call: str, *arguments: Any) -> Any:
    return _call_all(nvrtc, call, *arguments)[0]


def _call_all(nvrtc: ModuleType, call: str, *arguments: Any) -> tuple[Any, ...]:
    status, *results = getattr(nvrtc, call)(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaError(f"{call} failed with {status.name}", call=call, status=status.name)
    return tuple(results)


def _listed(architectures: list[int]) -> str:
    return ", ".join(f"{number // 10}.{number % 10}" for number in architectures)
