"""The questions of ``mosaic bench`` as measurements, and further questions about green contexts.

They answer the cost of contexts, the memory freed by destroying them and their maximum number (``pool``), and the
confinement of forward and backward (``isolation``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import mosaic
from bench.gpu.bench import Bench
from bench.gpu.models import Step, Workload, colocated, even_plan
from bench.record import Figure, median_figure, missing_figure
from mosaic.backends.cuda import driver as cuda
from mosaic.engine import find_modules
from mosaic.microbench import QUESTIONS, Setup
from mosaic.microbench.kernels import default_subjects
from mosaic.microbench.result import ABSENT, Row
from mosaic.microbench.settings import Spread
from mosaic.microbench.variants import CapturedSteps, EagerSteps, open_variant
from mosaic.profiler import Counters, open_counters


def measure_question(bench: Bench, *, name: str, grid: int = 8) -> Iterator[Figure]:
    """Measures a question with at most ``grid`` quotas; yields rows immediately."""
    if name not in QUESTIONS:
        yield missing_figure(name, f"unknown question {name!r}; choose one of: {', '.join(QUESTIONS)}")
        return
    setup = Setup(backend=bench.backend, settings=bench.settings(grid=grid), budget=bench.budget)
    for row in QUESTIONS[name].rows(setup):
        yield from figures_of(row)
    bench.notes += setup.notes


def figures_of(row: Row) -> Iterator[Figure]:
    """Yields a figure per number of a row, and one without a number for an unavailable measurement."""
    if row.of == ABSENT:
        yield missing_figure("absent", row.note, {"what": str(row.labels["subject"])})
        return
    labels = {"of": row.of} | {name: str(label) for name, label in row.labels.items()}
    for name, value in row.values.items():
        if isinstance(value, Spread):
            yield median_figure(name, value.samples, labels=labels)
        elif value is not None:
            yield Figure(name=name, source="measured", value=float(value), labels=labels)


def measure_outside_backward(bench: Bench) -> Iterator[Figure]:
    """Finds the SMs of a backward started from the caller's stream, whose forward ran on a partition."""
    half = tuple(range(max(1, bench.device.num_slots // 2)))
    with bench.backend.open_lanes([half]) as lanes:
        lane = lanes.lane(half)
        loss, seen = lane.submit(lambda: _seen_in_backward(bench)).wait()
        loss.backward()
        bench.synchronize()
        labels = {"slots": str(len(half)), "backward started": "outside of the lane"}
        if not bench.on_gpu:
            yield missing_figure("num_sms", "on the host an operator's backward runs on the caller's thread", labels)
            return
        driver = cuda.CudaDriver(bench.torch_device.index or 0)
        inside = set(driver.probe_stream(int(lane.stream.cuda_stream)))  # type: ignore[attr-defined]
        units = set(driver.probe_stream(seen[0]))
    yield Figure(name="num_sms", source="measured", value=float(len(units)), labels=labels)
    yield Figure(name="num_sms_outside", source="measured", value=float(len(units - inside)), labels=labels)


def _seen_in_backward(bench: Bench) -> tuple[torch.Tensor, list[int]]:
    """Returns a loss, and a list to which its backward appends its stream."""
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
    settings = bench.settings()
    modules = default_subjects(settings.scale, bench.torch_device)
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
                    steps = steps_of(variant, modules, backward=True)
                    steps.run(2)
                    times = [ms for _ in range(settings.rounds) for ms in steps.run(settings.steps_per_round)]
                    steps.close()
                yield median_figure("step_ms", times, labels=labels)
            except Exception as error:  # becomes the reason of this figure; other variants continue
                yield missing_figure("step_ms", error, labels)


WIDTH = 256
RECORDED_STEPS = 100  # timelines record all calls


class Towers(nn.Module):
    """Two small encoders of equal size and a contrastive loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2 * num_layers)]
        self.left, self.right = nn.Sequential(*layers[::2]), nn.Sequential(*layers[1::2])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = (nn.functional.normalize(hidden.mean(1), dim=-1) for hidden in (self.left(x), self.right(y)))
        return nn.functional.cross_entropy(left @ right.T, torch.arange(len(x), device=x.device))


def measure_launching(bench: Bench) -> Iterator[Figure]:
    """Measures the CPU time of all threads that launch a step of two towers: on lanes, and plain before and after."""
    x, y = (torch.randn(4, 16, WIDTH, device=bench.torch_device) for _ in range(2))
    warm_up, num_steps = (2, 4) if bench.dry_run else (10, 40)
    for num_layers in (1,) if bench.dry_run else (1, 4, 12):
        model = Towers(num_layers).to(bench.torch_device)
        optimizer = torch.optim.AdamW(model.parameters())

        def times(first: int, count: int, model: nn.Module = model, optimizer: Any = optimizer) -> list[float]:
            samples = []
            for _ in range(first + count):
                busy = time.process_time()
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                bench.synchronize()
                samples.append((time.process_time() - busy) * 1e3)
            return samples[first:]

        plain = times(warm_up, num_steps)
        plan = even_plan(find_modules(model, (x, y)).graph, bench.device)
        handle = mosaic.colocate(model, sample=(x, y), plan=plan, backend=bench.backend)
        lanes = times(warm_up if bench.dry_run else RECORDED_STEPS, 2 * num_steps)
        handle.remove()
        plain += times(warm_up, num_steps)
        for variant, samples in {"plain": plain, "lanes": lanes}.items():
            yield median_figure("launching_cpu_ms", samples, labels={"layers": str(num_layers), "variant": variant})


WINDOW_S = 1.0
NAMES = ("sm_occupancy", "sm_util", "dram_bandwidth")
"""Counters; the first is the share of active warps."""


def measure_warps(
    bench: Bench, *, name: str = "clip", batch: int = 8, counters: Counters | None = None
) -> Iterator[Figure]:
    """Reads the counters during steps of the plain loop, and of the even split on green lanes, in percent.

    If they are unavailable or not permitted, the figure has the reason. ``counters`` are by default the device's.
    """
    counters = counters or open_counters(bench.backend)
    if counters is None:
        yield missing_figure(f"{NAMES[0]}_percent", "the host has no such counters", {"model": name})
        return
    with counters:
        if counters.missing:
            yield missing_figure(f"{NAMES[0]}_percent", counters.missing, {"model": name})
            return
        work = Workload(name, batch, bench)
        plan = even_plan(find_modules(work.model, work.loss, include=work.modules).graph, bench.device)
        with colocated(work, plan, bench.backend) as (plain, green):
            for loop, step in {"plain": plain, "green lanes": green}.items():
                yield from _read(counters, bench, step, {"model": name, "loop": loop})


def _read(counters: Counters, bench: Bench, step: Step, labels: dict[str, str]) -> Iterator[Figure]:
    for _ in range(2):
        step()
    bench.synchronize()
    seen = counters.during(lambda: (step(), bench.synchronize()), WINDOW_S)
    for name in NAMES:
        value = getattr(seen, name, None)
        if value is None:
            yield missing_figure(f"{name}_percent", "NVML gave no value at the end of the window", labels)
        else:
            yield Figure(name=f"{name}_percent", source="measured", value=100 * value, labels=labels)
