"""The identity of a measurement: the module's structure, its inputs, and the machine and software that it ran on."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import CodeType, FunctionType

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import describe_driver
from mosaic.backends.cuda.environment import describe_nvml
from mosaic.device import Device, StrictFile
from mosaic.errors import BackendUnavailableError
from mosaic.find.structure import tensors_in
from mosaic.hardware.find import available_cores
from mosaic.profile import Environment, ModuleStructure
from mosaic.profiler.subject import Subject

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleKey(StrictFile):
    """All that a module's time depends on; modules of equal keys share measurements."""

    structure: str
    """See ``digest_of``."""
    inputs: str
    """See ``inputs_of``."""
    device: Device
    """Its device without memory, which decides whether a module fits and not how long it takes."""
    torch_version: str
    """Version of torch."""
    driver: str
    """Release of the kernel driver and version of CUDA; empty on the host."""
    threads: str = ""
    """Threads that compute on the host: cores, inter-op threads, and how idle ones wait; empty on a GPU."""


def key_of(subject: Subject, backend: Backend, environment: Environment) -> ModuleKey:
    """Returns the key of a module's measurements on a backend."""
    threads = ""
    if backend.torch_device.type != "cuda":  # a lane has a thread for each of its slots; these may share its cores
        waiting = os.environ.get("OMP_WAIT_POLICY", "").lower() or "default"
        threads = f"{len(available_cores())} cores, {torch.get_num_interop_threads()} inter-op, waiting {waiting}"
    return ModuleKey(
        structure=digest_of(subject.module),
        inputs=inputs_of(subject),
        device=dataclasses.replace(backend.device, memory_bytes=0),  # a kernel's count of memory may grow after boot
        torch_version=environment.torch_version,
        driver=" ".join(filter(None, (environment.driver, environment.driver_version, backend.sm_settings))),
        threads=threads,
    )


def structures_of(subjects: Iterable[Subject]) -> tuple[ModuleStructure, ...]:
    """Returns digests of modules, for a profile and to compare one with."""
    return tuple(ModuleStructure(module=subject.name, digest=digest_of(subject.module)) for subject in subjects)


def digest_of(module: nn.Module) -> str:
    """Returns 16 hexadecimal digits that change with whatever decides a module's time.

    Those are the classes of all its parts with their settings (what they print, and plain attributes such as
    ``training``), the compiled methods of classes that are not torch's own, and shape, dtype and ``requires_grad`` of
    parameters and buffers. Values of parameters do not count, nor functions and globals that a method uses.
    """
    seen: set[type] = set()
    parts = []
    for path, part in module.named_modules():
        settings = sorted(
            (name, value)
            for name, value in vars(part).items()
            if not name.startswith("_") and isinstance(value, _PLAIN)  # of the module's author: a number of heads
        )
        parts.append(f"{path}: {type(part).__module__}.{type(part).__qualname__}({part.extra_repr()}) {settings!r}")
        for base in type(part).__mro__:
            if base not in seen and base is not object and base.__module__.split(".")[0] != "torch":
                seen.add(base)
                parts += _code_of(base)
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        parts.append(f"{path}: {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
    return _hashed(parts)


def inputs_of(subject: Subject) -> str:
    """Returns 16 hexadecimal digits that change with shapes, dtypes and plain values of a call, and with autocast."""
    value = subject.args, subject.kwargs
    parts = [f"{tuple(t.shape)} {tuple(t.stride())} {t.dtype} {t.requires_grad}" for t in tensors_in(value)]
    parts += [repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__ for leaf in pytree.tree_leaves(value)]
    # The thread's settings that change every operator.
    parts.append(f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}")
    if subject.settings is not None:
        with subject.settings():
            cast = [f"{k} {torch.is_autocast_enabled(k)} {torch.get_autocast_dtype(k)}" for k in ("cpu", "cuda")]
            parts.append(f"{torch.is_grad_enabled()} {' '.join(cast)}")
    return _hashed(parts)


def _hashed(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code_of(kind: type) -> Iterator[str]:
    """The class's own methods, without their place in a file."""
    for name, value in sorted(vars(kind).items()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType):
            defaults = [repr(value) for value in function.__defaults__ or () if isinstance(value, _PLAIN)]
            yield f"{kind.__qualname__}.{name}: {defaults} {_text_of(function.__code__)}"


def _text_of(value: object) -> str:
    """Text of a compiled function or constant that is the same in every process."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {value.co_varnames} {[_text_of(v) for v in value.co_consts]}"
    if isinstance(value, frozenset):
        return str(sorted(map(repr, value)))  # its own order changes from process to process
    return repr(value)


def now_utc() -> str:
    """Returns the date and time of a sample or a profile: ISO 8601, UTC, to the millisecond; texts sort by time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment_of(
    backend: Backend,
    *,
    foreign_cpu_share: float = 0.0,
    clocks_mhz: Sequence[tuple[int, int]] = (),
    began: str = "",
) -> Environment:
    """Returns a backend's machine and software, and how quiet the machine was.

    Args:
        backend: Where it was measured.
        foreign_cpu_share: Share of the CPU that other processes took.
        clocks_mhz: SM and memory clocks, each time that they were read; the medians are kept.
        began: When measuring began, as ``now_utc`` says it.
    """
    driver_version = driver = ""
    if backend.torch_device.type == "cuda":
        driver_version = describe_driver().version
        with suppress(BackendUnavailableError):
            driver = describe_nvml().driver_version
    sm_clock, memory_clock = zip(*clocks_mhz, strict=True) if clocks_mhz else ((0,), (0,))
    return Environment(
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        driver_version=driver_version,
        driver=driver,
        sm_clock_mhz=round(statistics.median(sm_clock)),
        memory_clock_mhz=round(statistics.median(memory_clock)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        began=began,
        foreign_cpu_share=round(foreign_cpu_share, 4),
    )
