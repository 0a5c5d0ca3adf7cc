"""The kernels that are measured: one for each way in which a GPU can be the bottleneck.

Their data is random: constant data switches fewer transistors, and matrix units run faster on it than on any that is
trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from mosaic.microbench.settings import Scale
from mosaic.microbench.timing import Call
from mosaic.profiler import Subject


class Work(Protocol):
    """Something to repeat on a lane."""

    @property
    def name(self) -> str:
        """What it is."""

    @property
    def flops(self) -> float:
        """Floating-point operations of a call; 0 where it is not counted."""

    @property
    def moved_bytes(self) -> float:
        """Least traffic with memory of a call; 0 where it is not counted."""

    def prepare(self, device: torch.device) -> Call:
        """Makes inputs of its own on a device and returns a call; the first call has been done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operator at one size."""

    name: str
    """What it is."""
    bound_by: str
    """What limits it on a whole device."""
    flops: float
    """Floating-point operations of a call; 0 where it is not counted."""
    moved_bytes: float
    """Least traffic with memory of a call; 0 where it is not counted."""
    make: Callable[[torch.device], Call]
    """Makes inputs and returns a call."""

    def prepare(self, device: torch.device) -> Call:
        """Makes inputs and calls once on the caller's stream, where libraries may look for their best kernel."""
        call = self.make(device)
        call()
        return call


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """Forward, or forward and backward, of one of a user's modules."""

    subject: Subject
    """The module with its inputs."""
    backward: bool
    """Whether backward belongs to a call."""

    @property
    def name(self) -> str:
        """The module's name and what a call does."""
        return f"{self.subject.name} {'forward+backward' if self.backward else 'forward'}"

    @property
    def flops(self) -> float:
        """Not counted."""
        return 0.0

    @property
    def moved_bytes(self) -> float:
        """Not counted."""
        return 0.0

    def prepare(self, device: torch.device) -> Call:
        """Takes the module as it is; its inputs are on the device already."""

        def call() -> None:
            outputs = self.subject.forward()
            if self.backward:
                self.subject.backward(outputs)

        call()
        return call


def kernel_set(scale: Scale, device: torch.device) -> tuple[Kernel, ...]:
    """Returns all kernels at a scale; half precision on GPUs, in the format that has matrix units there."""
    dtype = half_type(device)
    return (
        _gemm({"tiny": 32, "host": 512, "gpu": 4096}[scale], dtype),
        _attention({"tiny": (1, 2, 16), "host": (2, 4, 256), "gpu": (8, 16, 2048)}[scale], dtype),
        _convolution({"tiny": (1, 4, 8), "host": (4, 32, 32), "gpu": (32, 256, 56)}[scale], dtype),
        _elementwise({"tiny": 1 << 10, "host": 1 << 22, "gpu": 1 << 28}[scale], dtype),
        _reduction({"tiny": 1 << 10, "host": 1 << 22, "gpu": 1 << 28}[scale]),
        _launches({"tiny": 4, "host": 64, "gpu": 64}[scale]),
    )


def kernels_named(names: tuple[str, ...], scale: Scale, device: torch.device) -> tuple[Kernel, ...]:
    """Returns the named kernels in the order of the set."""
    return tuple(kernel for kernel in kernel_set(scale, device) if kernel.name in names)


def short_kernel(scale: Scale, device: torch.device) -> Kernel:
    """Returns a kernel that fills few SMs for a moment."""
    return _gemm({"tiny": 8, "host": 64, "gpu": 256}[scale], half_type(device))


def long_kernels(scale: Scale, device: torch.device) -> tuple[Kernel, ...]:
    """Returns kernels that fill every SM for long: one bound by arithmetic, one by bandwidth."""
    dtype = half_type(device)
    return (
        _gemm({"tiny": 64, "host": 768, "gpu": 8192}[scale], dtype),
        _elementwise({"tiny": 1 << 12, "host": 1 << 23, "gpu": 1 << 30}[scale], dtype),
    )


def half_type(device: torch.device) -> torch.dtype:
    """Returns the type to compute in: bfloat16 from Ampere on, float16 before, float32 on the host."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def _gemm(size: int, dtype: torch.dtype) -> Kernel:
    def make(device: torch.device) -> Call:
        left, right, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
        return lambda: torch.mm(left, right, out=out)

    moved = 3.0 * size * size * dtype.itemsize
    return Kernel(name="gemm", bound_by="matrix units", flops=2.0 * size**3, moved_bytes=moved, make=make)


def _attention(shape: tuple[int, int, int], dtype: torch.dtype) -> Kernel:
    batch, heads, length = shape
    width = 64

    def make(device: torch.device) -> Call:
        query, key, value = (torch.randn(batch, heads, length, width, device=device, dtype=dtype) for _ in range(3))
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)

    flops = 4.0 * batch * heads * length**2 * width
    moved = 4.0 * batch * heads * length * width * dtype.itemsize
    return Kernel(name="attention", bound_by="matrix units and exponentials", flops=flops, moved_bytes=moved, make=make)


def _convolution(shape: tuple[int, int, int], dtype: torch.dtype) -> Kernel:
    batch, channels, side = shape

    def make(device: torch.device) -> Call:
        image = torch.randn(batch, channels, side, side, device=device, dtype=dtype)
        weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
        image, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (image, weight))
        return lambda: torch.nn.functional.conv2d(image, weight, padding=1)

    flops = 2.0 * batch * side**2 * channels**2 * 9
    moved = (2.0 * batch * channels * side**2 + 9.0 * channels**2) * dtype.itemsize
    return Kernel(name="convolution", bound_by="matrix units", flops=flops, moved_bytes=moved, make=make)


def _elementwise(count: int, dtype: torch.dtype) -> Kernel:
    def make(device: torch.device) -> Call:
        given, out = (torch.randn(count, device=device, dtype=dtype) for _ in range(2))
        return lambda: torch.mul(given, 1.5, out=out)

    moved = 2.0 * count * dtype.itemsize
    return Kernel(name="elementwise", bound_by="memory bandwidth", flops=float(count), moved_bytes=moved, make=make)


def _reduction(count: int) -> Kernel:
    def make(device: torch.device) -> Call:
        given = torch.randn(count, device=device)
        return given.sum

    return Kernel(name="reduction", bound_by="memory bandwidth", flops=float(count), moved_bytes=4.0 * count, make=make)


def _launches(count: int) -> Kernel:
    def make(device: torch.device) -> Call:
        value = torch.ones(1024, device=device)

        def call() -> None:
            for _ in range(count):
                value.mul_(1.0)

        return call

    return Kernel(name="launches", bound_by="launching", flops=1024.0 * count, moved_bytes=0.0, make=make)
