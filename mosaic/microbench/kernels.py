"""The measured work: a kernel per GPU bottleneck, and two unequal modules.

Data is random, because matrix units are faster on constant data, which switches fewer transistors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mosaic.find.random_numbers import forked
from mosaic.microbench.settings import Scale
from mosaic.profiler import Subject
from mosaic.profiler.timing import Call


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator at one size, or one module and its passes."""

    name: str
    make: Callable[[torch.device], Call]
    """Creates inputs and returns a call."""
    flops: float = 0.0
    """FLOPs of a call; 0 if not counted."""
    moved_bytes: float = 0.0
    """Minimum memory traffic of a call; 0 if not counted."""

    def prepare(self, device: torch.device) -> Call:
        """Creates inputs and calls once on the caller's stream, where libraries may choose kernels."""
        call = self.make(device)
        call()
        return call

    def gb_per_s(self, time_ms: float) -> float | None:
        """Returns the bandwidth of a call in GB/s; None if its traffic is not counted."""
        return self.moved_bytes / time_ms / 1e6 if self.moved_bytes and time_ms > 0 else None


def kernel_set(scale: Scale, device: torch.device, names: Sequence[str] = ()) -> tuple[Kernel, ...]:
    """Returns the named kernels, or all, at a scale; on GPUs in half precision."""
    dtype = half_type(device)
    kernels = (
        gemm({"tiny": 32, "host": 512, "gpu": 4096}[scale], dtype),
        _attention(*{"tiny": (1, 2, 16), "host": (2, 4, 256), "gpu": (8, 16, 2048)}[scale], dtype),
        _convolution(*{"tiny": (1, 4, 8), "host": (4, 32, 32), "gpu": (32, 256, 56)}[scale], dtype),
        elementwise({"tiny": 1 << 10, "host": 1 << 22, "gpu": 1 << 28}[scale], dtype),
        _launches({"tiny": 4, "host": 64, "gpu": 64}[scale]),
    )
    return tuple(kernel for kernel in kernels if not names or kernel.name in names)


def half_type(device: torch.device) -> torch.dtype:
    """Returns the dtype: bfloat16 from Ampere on, float16 before, float32 on the host."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def gemm(size: int, dtype: torch.dtype) -> Kernel:
    def make(device: torch.device) -> Call:
        left, right, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
        return lambda: torch.mm(left, right, out=out)

    return Kernel("gemm", make, flops=2.0 * size**3, moved_bytes=3.0 * size * size * dtype.itemsize)


def _attention(batch: int, heads: int, length: int, dtype: torch.dtype, width: int = 64) -> Kernel:
    def make(device: torch.device) -> Call:
        query, key, value = (torch.randn(batch, heads, length, width, device=device, dtype=dtype) for _ in range(3))
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)

    size = batch * heads * length * width
    return Kernel("attention", make, flops=4.0 * size * length, moved_bytes=4.0 * size * dtype.itemsize)


def _convolution(batch: int, channels: int, side: int, dtype: torch.dtype) -> Kernel:
    def make(device: torch.device) -> Call:
        image = torch.randn(batch, channels, side, side, device=device, dtype=dtype)
        weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
        image, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (image, weight))
        return lambda: torch.nn.functional.conv2d(image, weight, padding=1)

    moved = (2.0 * batch * channels * side**2 + 9.0 * channels**2) * dtype.itemsize
    return Kernel("convolution", make, flops=18.0 * batch * side**2 * channels**2, moved_bytes=moved)


def elementwise(count: int, dtype: torch.dtype) -> Kernel:
    def make(device: torch.device) -> Call:
        source, out = (torch.randn(count, device=device, dtype=dtype) for _ in range(2))
        return lambda: torch.mul(source, 1.5, out=out)

    return Kernel("elementwise", make, flops=float(count), moved_bytes=2.0 * count * dtype.itemsize)


def _launches(count: int) -> Kernel:
    def make(device: torch.device) -> Call:
        value = torch.ones(1024, device=device)

        def call() -> None:
            for _ in range(count):
                value.mul_(1.0)

        return call

    return Kernel("launches", make, flops=1024.0 * count)


def default_subjects(scale: Scale, device: torch.device, *, seed: int = 0) -> tuple[Subject, Subject]:
    """Returns two modules with inputs on a device, reproducible by seed."""
    dtype = half_type(device)
    layers, width, heads, length, channels, side, batch = {
        "tiny": (1, 16, 2, 8, 4, 8, 2),
        "host": (2, 128, 4, 64, 32, 28, 8),
        "gpu": (6, 768, 12, 197, 256, 56, 16),
    }[scale]
    with forked(python=False):
        torch.manual_seed(seed)
        blocks = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        ]
        pairs = [(nn.Conv2d(channels, channels, 3, padding=1), nn.GELU()) for _ in range(layers)]
        tokens, image = torch.randn(batch, length, width), torch.randn(batch, channels, side, side)
    encoder = nn.Sequential(*blocks).to(device, dtype)
    convolutions = nn.Sequential(*(layer for pair in pairs for layer in pair)).to(device, dtype)
    return (
        Subject("transformer", encoder, (tokens.to(device, dtype),), {}),
        Subject("convolutions", convolutions, (image.to(device, dtype),), {}),
    )
