"""Open questions about green contexts, each as a small measurement.

What the questions of ``mosaic bench`` answer is not repeated here. Cost of contexts, whether ending them gives memory
back, and how many there can be: ``pool``. Confinement of forward, and of a backward started on its lane: ``isolation``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.bench import Bench
from bench.record import Figure, median_figure, missing_figure
from mosaic.backends.cuda import driver as cuda
from mosaic.microbench.kernels import default_subjects
from mosaic.microbench.settings import time_alone
from mosaic.microbench.variants import CapturedSteps, EagerSteps, TwoModules, open_variant


def measure_outside_backward(bench: Bench) -> Iterator[Figure]:
    """Looks where a backward runs whose forward ran on a partition, started from the caller's own stream."""
    half = tuple(range(max(1, bench.device.num_slots // 2)))
    with bench.backend.open_lanes([half]) as lanes:
        lane = lanes.lane(half)
        loss, seen = lane.submit(lambda: _seen_in_backward(bench)).wait()
        loss.backward()
        bench.synchronize()
        labels = {"slots": str(len(half)), "backward started": "outside of the lane"}
        if not bench.on_gpu:
            yield missing_figure("num_sms", "on the host an operator's backward runs where it is called", labels)
            return
        inside = set(cuda.CudaDriver(bench.torch_device.index or 0).probe_stream(int(lane.stream.cuda_stream)))  # type: ignore[attr-defined]
        units = set(cuda.CudaDriver(bench.torch_device.index or 0).probe_stream(seen[0]))
    yield Figure(name="num_sms", source="measured", value=float(len(units)), labels=labels)
    yield Figure(name="num_sms_outside", source="measured", value=float(len(units - inside)), labels=labels)


def _seen_in_backward(bench: Bench) -> tuple[torch.Tensor, list[int]]:
    """Returns a loss, and a list to which its backward adds the stream that it runs on."""
    seen: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            seen.append(int(torch.cuda.current_stream().cuda_stream) if bench.on_gpu else 0)
            return gradients[0]

    value = torch.ones(8, device=bench.torch_device, requires_grad=True)
    return Look.apply(value).sum(), seen


def measure_connections(bench: Bench) -> Iterator[Figure]:
    """Times a step of two modules on two partitions, under the CUDA_DEVICE_MAX_CONNECTIONS of this process."""
    import os

    settings = bench.settings()
    first, second = default_subjects(settings.scale, bench.torch_device)
    modules = TwoModules(first, second, backward=True)
    count = bench.device.num_slots
    split = (max(1, count // 2), max(1, count - count // 2))
    for kind in ("sequential", "plain", "partitions"):
        for launching, steps_of in (("eager", EagerSteps), ("captured", CapturedSteps)):
            connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
            labels = {"connections": connections, "kind": kind, "launching": launching}
            if not bench.budget.allows(f"{kind}, {launching}"):
                continue
            try:
                variant = open_variant(kind, bench.backend, split)
                with variant.lanes:
                    steps = steps_of(variant, modules)
                    steps.run(2)
                    times = [ms for _ in range(settings.rounds) for ms in steps.run(settings.steps_per_round)]
                    if isinstance(steps, CapturedSteps):
                        steps.close()
                yield median_figure("step_ms", times, labels=labels)
            except Exception as error:
                yield missing_figure("step_ms", error, labels)


def measure_small_collective(bench: Bench) -> Iterator[Figure]:
    """Runs an all-reduce of one rank in the smallest partition; says what one device cannot show."""
    import torch.distributed as dist

    labels = {"ranks": "1", "slots": "1"}
    name = "nccl" if bench.on_gpu else "gloo"
    if not dist.is_available() or (bench.on_gpu and not dist.is_nccl_available()):
        yield missing_figure("all_reduce_ms", f"this torch has no {name}", labels)
        return
    more = {"device_id": bench.torch_device} if bench.on_gpu else {}
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, **more)
    try:
        values = torch.ones(1 << (10 if bench.dry_run else 24), device=bench.torch_device)
        dist.all_reduce(values)  # communicators are made here, with no green context current
        with bench.backend.open_lanes([(0,)]) as lanes:
            times = time_alone(lanes.lane((0,)), lambda: dist.all_reduce(values), bench.settings()).all_ms
        yield median_figure("all_reduce_ms", times, labels=labels)
    finally:
        dist.destroy_process_group()
    yield missing_figure(
        "all_reduce_ms",
        "with one rank NCCL has nothing to reduce, and it refuses two ranks on one device: whether its kernels make "
        "progress in 8 SMs needs two devices",
        {"ranks": "2", "slots": "1"},
    )
