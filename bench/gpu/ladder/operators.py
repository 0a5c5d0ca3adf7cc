"""Rungs on operators: the same numbers on a lane as off it, and libraries that look at contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.bench import Bench
from bench.gpu.ladder import CLOSE
from bench.gpu.ladder.lanes import figures_of, halves, on_lanes, reading
from bench.record import Figure
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.streams.lanes import run_aside
from mosaic.microbench.kernels import half_type

Step = Callable[[], list[torch.Tensor]]
"""Computes forward and backward; returns the result and all gradients."""


def operators(bench: Bench) -> Iterator[Figure]:
    """Computes each operator on the default stream and on a lane."""
    with on_lanes(bench) as backend, backend.open_lanes(halves(backend)[:1]) as lanes:
        (lane,) = lanes
        result = {}
        for name, step in _operators(backend, bench.dry_run).items():
            result[name] = reading(lambda step=step: _difference(step(), lane.submit(step).wait()))
            yield from figures_of({name: result[name]})
    bench.verdict = judge_equal(result)


def judge_equal(result: Mapping[str, Any]) -> str:
    """Says which of several things differ on a lane, or fail there."""
    wrong = [f"{name}: {value}" for name, value in result.items() if isinstance(value, str)]
    wrong += [f"{name} differs by {v:.2g}" for name, v in result.items() if isinstance(v, float) and not v <= CLOSE]
    exact = [name for name, value in result.items() if value == 0]
    near = [f"{name} within {v:.1g}" for name, v in result.items() if isinstance(v, float) and 0 < v <= CLOSE]
    right = [f"equal bit for bit: {', '.join(exact)}"] * bool(exact) + near
    return "; ".join([*wrong, *right])


def _operators(backend: CudaBackend, dry_run: bool) -> dict[str, Step]:
    size = 8 if dry_run else 512
    left, right, bias = _leaves(backend, (size, size), (size, size), (size,))
    query, key, value = _leaves(backend, *[(2, 4, size // 4, 64)] * 3)
    table = _leaves(backend, (100, size))[0]
    ids = torch.arange(size, device=backend.torch_device) % 100
    return {
        "mm": _step(lambda: left @ right, left, right),
        "addmm": _step(lambda: torch.addmm(bias, left, right), bias, left, right),
        "attention": _step(lambda: functional.scaled_dot_product_attention(query, key, value), query, key, value),
        "layer norm": _step(lambda: functional.layer_norm(left, (size,), bias), left, bias),
        "embedding": _step(lambda: functional.embedding(ids, table), table),
    }


def conv_cold(bench: Bench) -> Iterator[Figure]:
    """Convolves on a lane before anywhere else."""
    yield from _convolutions(bench, "cold")


def conv_warm(bench: Bench) -> Iterator[Figure]:
    """Convolves on a lane after the same was done on a plain stream."""
    yield from _convolutions(bench, "warm")


def conv_native(bench: Bench) -> Iterator[Figure]:
    """Convolves on a lane with cuDNN off."""
    yield from _convolutions(bench, "native")


def _convolutions(bench: Bench, how: str) -> Iterator[Figure]:
    result = {}
    with on_lanes(bench) as backend, backend.open_lanes(halves(backend)[:1]) as lanes:
        (lane,) = lanes
        for name, step in _kernels(backend, bench.dry_run).items():
            if how == "warm":
                run_aside(backend.api, step)
            off = torch.backends.cudnn.flags(enabled=False) if how == "native" else nullcontext()

            def run(step: Step = step, off: Any = off) -> float:
                with off:
                    ours = lane.submit(step).wait()
                return _difference(step(), ours)

            result[name] = reading(run)
            yield from figures_of({name: result[name]})
    bench.verdict = judge_conv(how, result)


def judge_conv(how: str, result: Mapping[str, Any]) -> str:
    """Says whether convolutions run on lanes this way, and which switch helps where they do not."""
    said = judge_equal(result)
    if all(isinstance(value, float) and value <= CLOSE for value in result.values()):
        return said
    remedies = {
        "cold": "warm up outside of lanes first, as colocate does (see conv-warm)",
        "warm": "run lanes without it, CudaBackend(cudnn=False) (see conv-native)",
        "native": "leave modules with convolutions where they are: colocate(..., exclude=[...])",
    }
    return f"{said}: {remedies[how]}"


def _kernels(backend: CudaBackend, dry_run: bool) -> dict[str, Step]:
    side, width = (32, 4) if dry_run else (224, 64)
    image, patch = _leaves(backend, (8, 3, side, side), (width, 3, 16, 16))
    hidden, square = _leaves(backend, (8, width, side // 4, side // 4), (width, width, 3, 3))
    return {
        "patches 16x16": _step(lambda: functional.conv2d(image, patch, stride=16), image, patch),
        "convolution 3x3": _step(lambda: functional.conv2d(hidden, square, padding=1), hidden, square),
    }


def triton(bench: Bench) -> Iterator[Figure]:
    """Runs a kernel that Triton compiles on a lane."""
    with on_lanes(bench) as backend, backend.open_lanes(halves(backend)[:1]) as lanes:
        (lane,) = lanes

        def run() -> float:
            from bench.gpu.ladder.triton_double import double

            source = torch.randn(1 << 16, device=backend.torch_device)
            return _difference([source * 2], [lane.submit(lambda: double(source)).wait()])

        result = {"double": reading(run)}
    yield from figures_of(result)
    bench.verdict = judge_triton(result)


def judge_triton(result: Mapping[str, Any]) -> str:
    """Says whether compiled branches can be placed here."""
    value = result["double"]
    if value == 0:
        return "Triton kernels run on lanes: compiled branches can be placed"
    what = value if isinstance(value, str) else f"wrong by {value:.2g}"
    return f"{what}: leave compiled branches out of plans here, colocate(..., exclude=[...])"


def _leaves(backend: CudaBackend, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    device = backend.torch_device
    generator = torch.Generator(device).manual_seed(0)
    dtype = half_type(device)
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def _step(forward: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Step:
    def step() -> list[torch.Tensor]:
        result = forward()
        gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
        return [result.detach(), *gradients]

    return step


def _difference(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    """Returns the largest relative difference of any tensor, in the norm of the whole."""
    pairs = [(a.double(), b.double()) for a, b in zip(theirs, ours, strict=True)]
    return max(float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs)
