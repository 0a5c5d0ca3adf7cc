"""The least time of a step: operations and bytes counted, over ceilings measured on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu.bench import Bench
from bench.record import Figure, median_figure
from mosaic.microbench.kernels import half_type

ADAMW_BYTES = 28
"""Least traffic of AdamW a parameter: value, gradient, two moments read; value, two moments written; 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Count:
    """The needs of a training step on any device."""

    flops: float
    """Operations of matrix products, convolutions and attention, forward and backward."""
    moved_bytes: float
    """Least traffic with memory: weights and gradients of both passes, the optimizer, and kept activations."""
    parameters: int

    def bound_ms(self, tflops: float, gb_per_s: float) -> float:
        """Returns the roofline's time: the greater of arithmetic at its ceiling and traffic at its ceiling."""
        return max(self.flops / tflops / 1e9, self.moved_bytes / gb_per_s / 1e6)


def measure_ceilings(bench: Bench) -> Iterator[Figure]:
    """Measures a large matrix product in half precision, and a large copy."""
    device, dtype = bench.torch_device, half_type(bench.torch_device)
    size, count = (64, 1 << 12) if bench.dry_run else (8192, 1 << 30)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = _times_ms(bench, lambda: torch.mm(left, right, out=out))
    yield median_figure("bf16_tflops", [2.0 * size**3 / ms / 1e9 for ms in times], labels={"size": str(size)})
    source = torch.ones(count, device=device, dtype=torch.float32)
    taken = torch.empty_like(source)
    times = _times_ms(bench, lambda: taken.copy_(source))
    yield median_figure(
        "copy_gb_per_s", [2.0 * source.nbytes / ms / 1e6 for ms in times], labels={"bytes": str(source.nbytes)}
    )


def _times_ms(bench: Bench, call: Callable[[], object], repeats: int = 12) -> list[float]:
    for _ in range(3):
        call()
    times_ms = []
    for _ in range(3 if bench.dry_run else repeats):
        bench.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            call()
        bench.synchronize()
        times_ms.append(max(1e-6, (time.perf_counter() - start) * 1e3 / 4))
    return times_ms


def count_step(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Count:
    """Counts one forward and backward; leaves no gradients.

    Bytes are a lower bound: each weight is read in both passes, its gradient is written and read, the optimizer
    touches its state once, and what is kept for backward is written once and read once.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved_bytes: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss_of()
        activations = sum(saved_bytes.values())
        loss.backward()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    read = sum(2 * p.nbytes for p in model.parameters())
    model.zero_grad(set_to_none=True)
    moved = read + trained * (4 + ADAMW_BYTES) + 2 * activations
    return Count(float(counter.get_total_flops()), float(moved), trained)
