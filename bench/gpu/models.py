"""Training steps of six models, plain in several variants and with Mosaic, and their lower bounds.

Variants take turns with the plain loop, by importance: variants without a profile come first. Figures are yielded
immediately.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import mosaic
from bench.gpu.bench import Bench
from bench.gpu.tables import MAX_LOSS_DIFFERENCE
from bench.record import Figure, median_figure, missing_figure
from mosaic import models
from mosaic.backends.base import Backend, Lanes
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.cost.counting import count_module
from mosaic.device import Device
from mosaic.engine import find_modules
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.graph import ModuleGraph
from mosaic.microbench.kernels import half_type
from mosaic.plan import Plan, plan_from_quotas

EQUALITY_STEPS = 3
MAX_BATCH = 8
"""Batch size, if it fits into memory."""
GPU_BYTES = 78 << 30
"""Memory that ``Row.gpu_batch`` is counted for."""
WARM_STEPS = 5
"""Warm-up steps: libraries choose kernels, and stages are captured after a few calls."""
ROUND_S = 0.06
ROUNDS = 7
MIN_ROUNDS = 2
ONE_GRAPH = "plain, one CUDA graph"
BY_HAND = "even split by hand"
EVEN_VARIANTS = ("plain streams", "green lanes", "green lanes, graphs", "green lanes, SM targets")
MOSAIC = "mosaic"
"""The default: the choice of the trial."""
WORTH = MappingProxyType({ONE_GRAPH: 1.0, **dict.fromkeys(EVEN_VARIANTS, 1.0), MOSAIC: 4.0})
"""Measurements after the plain step, in order, with their shares of the remaining time."""
ADAMW_BYTES = 28
"""Minimum bytes of AdamW per parameter: value, gradient, two moments read; value, two moments written; 4 bytes each."""

Step = Callable[[], torch.Tensor]
Variant = AbstractContextManager[tuple[Step, Step]]
"""The plain step during a variant, and the variant's step."""


def samples_that_fit(name: str, memory_bytes: int, batch: int = MAX_BATCH) -> int:
    """Returns the number of samples, at most ``batch``, that fits into a device's memory.

    Raises:
        MosaicError: One sample does not fit.
    """
    most = models.find_model(name).gpu_batch * memory_bytes // GPU_BYTES
    if most < 1:
        raise MosaicError(
            f"{name}-gpu with one sample does not fit into {memory_bytes / 2**30:.0f} GiB; use a larger device"
        )
    return min(batch, most)


class Workload:
    """A model, a batch and the training loop, common to all variants, with the same initial weights.

    Attributes:
        batch: Samples per step, reduced if they do not fit into memory.
    """

    def __init__(self, name: str, batch: int, bench: Bench) -> None:
        size = "tiny" if bench.dry_run else "gpu"
        self.batch = batch if bench.dry_run else samples_that_fit(name, bench.device.memory_bytes, batch)
        self.device = bench.torch_device
        self.modules = models.find_model(name).modules
        self.model = models.build(name, size, device=self.device)
        self.inputs = models.make_batch(name, size, batch=self.batch, device=self.device)
        on_gpu = {"fused": True, "capturable": True} if bench.on_gpu else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **on_gpu)
        self._first = [parameter.detach().clone() for parameter in self.model.parameters()]

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return models.loss_of(self.model(**self.inputs))

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, step: Step, count: int = EQUALITY_STEPS) -> list[float]:
        """Resets weights and optimizer, and returns the losses of the first steps."""
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self._first, strict=True):
                parameter.copy_(first)
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        return [float(step()) for _ in range(count)]


@contextmanager
def whole_step_graph(work: Workload, bench: Bench) -> Iterator[tuple[Step, Step]]:
    """The plain step, including the optimizer, as one CUDA graph."""
    if not bench.on_gpu:
        raise BackendUnavailableError("a step cannot be captured", found="the host backend", needed="a GPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    work.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # a failing capture leaves its stream
        loss = work.loss()
        loss.backward()
        work.optimizer.step()
    loss = loss.detach()  # otherwise the graph would accumulate the plain loop's gradients on the capture stream
    work.optimizer.zero_grad(set_to_none=True)  # the graph has its own gradients

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    try:
        yield work.step, replay
    finally:
        torch.cuda.synchronize()
        graph.reset()


@contextmanager
def colocated(work: Workload, plan: Plan, backend: Backend, *, graphs: bool = False) -> Iterator[tuple[Step, Step]]:
    """The loop with a plan, on a backend's lanes."""
    if graphs and backend.device.kind == "host":
        raise BackendUnavailableError("stages cannot be captured", found="the host backend", needed="a GPU")
    options = mosaic.Options(cuda_graphs=graphs)
    handle = mosaic.colocate(
        work.model, sample=work.loss, plan=plan, backend=backend, modules=work.modules, options=options
    )

    def plain() -> torch.Tensor:
        with handle.disabled():
            return work.step()

    try:
        yield plain, work.step
    finally:
        handle.remove()


@contextmanager
def by_default(work: Workload, bench: Bench, seconds: float) -> Iterator[tuple[Step, Step]]:
    """The loop after ``mosaic.colocate``, with a time limit for its trial."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:  # without results of earlier runs
        options = mosaic.Options(cache=folder)
        handle = mosaic.colocate(work.model, sample=work.loss, backend=bench.backend, options=options)
        ready_s = time.perf_counter() - began
        try:
            while handle.is_trying and time.perf_counter() - began < ready_s + seconds:
                work.step()
            bench.notes += [f"{MOSAIC}: ready after {ready_s:.1f} s", *handle.describe().splitlines()]

            def plain() -> torch.Tensor:
                with handle.disabled():
                    return work.step()

            yield plain, work.step
        finally:
            handle.remove()


class PlainStreams:
    """A backend with plain streams of all SMs as lanes: no quotas."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open_lanes(self, partitions: Any) -> Lanes:
        return self._backend.open_plain_lanes(partitions)


def lanes_of(bench: Bench, *, sm_target: bool) -> Backend:
    """Returns the backend with or without SM targets.

    Raises:
        BackendUnavailableError: SM targets cannot be set here.
    """
    if bench.device.kind != "host":
        return CudaBackend(bench.torch_device.index or 0, sm_target=sm_target)
    if sm_target:
        raise BackendUnavailableError("SM targets cannot be set", found="the host backend", needed="a GPU")
    return bench.backend


class Rounds:
    """Variants of one loop, in alternating rounds with the plain loop.

    Each piece of ``WORTH`` takes at most its share of the remaining time.

    Attributes:
        plain_ms: The median of the plain step.
        speedup: Median speed-up over alternating plain steps by variant, only with correct losses.
    """

    def __init__(self, work: Workload, bench: Bench) -> None:
        self.work = work
        self.bench = bench
        self.plain_ms = 0.0
        self.speedup: dict[str, float] = {}
        self._plain: list[float] = []
        self._steps = 1

    def share_s(self, name: str) -> float:
        names = list(WORTH)
        later = sum(WORTH[other] for other in names[names.index(name) :])
        return self.bench.budget.left_s * WORTH[name] / later

    def measure_plain(self) -> Iterator[Figure]:
        """Yields the plain step, the baseline."""
        work, bench = self.work, self.bench
        work.step()  # the optimizer creates its state
        self._plain = work.losses(work.step)
        times = [_step_ms(work.step, bench, 1)[0] for _ in range(3)]
        self._steps = 1 if bench.dry_run else max(1, round(ROUND_S * 1e3 / statistics.median(times)))
        samples = [_step_ms(work.step, bench, self._steps) for _ in range(3)]
        self.plain_ms = statistics.median(wall for wall, _ in samples)
        yield from _times(samples, {"variant": "plain"})
        yield from self._peak({"variant": "plain"})

    def measure(
        self,
        name: str,
        opened: Callable[[], Variant],
        labels: dict[str, str] | None = None,
        *,
        captures: bool = False,
    ) -> Iterator[Figure]:
        """Yields time, speed-up, difference of losses and memory of a variant, or the reason for their absence.

        Args:
            name: The variant.
            opened: Opens it.
            labels: Further labels of its figures.
            captures: Whether it captures stages in its first steps.
        """
        labels = {"variant": name, **(labels or {})}
        until_s = self.bench.budget.used_s + self.share_s(name)
        if not self.bench.budget.allows(name):
            yield missing_figure("step_ms", "no time was left", labels)
            return
        self._tidy()
        try:
            with opened() as (plain_step, step):
                yield from self._rounds(plain_step, step, labels, until_s, WARM_STEPS if captures else 1)
        except Exception as error:  # becomes the reason of a figure; other variants continue
            yield missing_figure("step_ms", error, labels)

    def won(self, name: str, over: str) -> bool:
        """Returns True if both variants were measured and the first is faster."""
        return name in self.speedup and over in self.speedup and self.speedup[name] > self.speedup[over]

    def _rounds(
        self, plain_step: Step, step: Step, labels: dict[str, str], until_s: float, warm_steps: int
    ) -> Iterator[Figure]:
        for _ in range(warm_steps):
            step()
        losses = self.work.losses(step)
        far = max(map(_difference, losses, self._plain))
        if math.isinf(far):
            raise ArithmeticError(f"its losses are {losses}, the plain loop's {self._plain}")
        yield Figure(name="loss_difference", source="measured", value=far, labels=labels)
        yield from self._peak(labels)  # before the plain loop takes turns with it
        for each in (plain_step, step):
            _step_ms(each, self.bench, 1)
        plain, ours = [], []
        for number in range(MIN_ROUNDS if self.bench.dry_run else ROUNDS):
            if number >= MIN_ROUNDS and self.bench.budget.used_s > until_s:
                break
            plain.append(_step_ms(plain_step, self.bench, self._steps))
            ours.append(_step_ms(step, self.bench, self._steps))
        ratios = [theirs / own for (theirs, _), (own, _) in zip(plain, ours, strict=True)]
        if far <= MAX_LOSS_DIFFERENCE:
            self.speedup[labels["variant"]] = statistics.median(ratios)
        else:
            self.bench.notes.append(
                f"{labels['variant']}: losses differ by {far:.3g} (relative), so its times do not count"
            )
        yield from _times(ours, labels)
        yield median_figure("speedup", ratios, labels=labels)

    def _peak(self, labels: dict[str, str]) -> Iterator[Figure]:
        if self.bench.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.bench.torch_device)
            yield Figure(name="peak_gib", source="measured", value=peak / 2**30, labels=labels)

    def _tidy(self) -> None:
        """Releases the memory of earlier variants and resets the peak; sticky device errors are raised again."""
        if self.bench.on_gpu:
            gc.collect()
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.bench.torch_device)
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.bench.torch_device)


def _times(samples: list[tuple[float, float]], labels: dict[str, str]) -> Iterator[Figure]:
    yield median_figure("step_ms", [wall for wall, _ in samples], labels=labels)
    yield median_figure("launching_cpu_ms", [launching for _, launching in samples], labels=labels)


def _difference(ours: float, theirs: float) -> float:
    """Returns the relative difference of two losses; infinite if only one is finite."""
    if math.isfinite(ours) and math.isfinite(theirs):
        return abs(ours - theirs) / max(1e-9, abs(theirs))
    return 0.0 if str(ours) == str(theirs) else math.inf


def _step_ms(step: Step, bench: Bench, steps: int) -> tuple[float, float]:
    """Returns the milliseconds per step of consecutive steps, and the CPU time of all launching threads."""
    bench.synchronize()
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    launching = time.process_time() - busy
    bench.synchronize()
    return (time.perf_counter() - start) * 1e3 / steps, launching * 1e3 / steps


def measure_model(bench: Bench, *, name: str, batch: int) -> Iterator[Figure]:
    """Measures all variants of one model at one batch size; an unavailable variant is a figure with a reason.

    If the largest batch does not fit into memory, it is measured with the samples that fit, and larger batches are
    omitted.
    """
    if not bench.dry_run:
        most = samples_that_fit(name, bench.device.memory_bytes)
        if most <= batch < MAX_BATCH:
            bench.verdict = f"measured as models/{name}/{MAX_BATCH}: a batch of {most} fits into memory"
            return
    work = Workload(name, batch, bench)
    bench.notes.append(f"{name}-{'tiny' if bench.dry_run else 'gpu'} of the zoo")
    for figure in _measure(Rounds(work, bench)):
        figure.labels.update(model=name, batch=str(work.batch))
        yield figure


def _measure(rounds: Rounds) -> Iterator[Figure]:
    work, bench = rounds.work, rounds.bench
    yield from rounds.measure_plain()
    yield from rounds.measure(ONE_GRAPH, lambda: whole_step_graph(work, bench))
    try:
        finding = find_modules(work.model, work.loss, include=work.modules)
    except Exception as error:  # becomes the reason of all figures that need modules
        yield from _none_of((*EVEN_VARIANTS, MOSAIC), error)
        return
    even = even_plan(finding.graph, bench.device)
    if even.is_colocated:
        yield from _by_hand(even, rounds)
    else:
        yield from _none_of(EVEN_VARIANTS, "no two modules are independent of each other")
    yield from _bound(work, bench)
    seconds = rounds.share_s(MOSAIC) / 2
    yield from rounds.measure(MOSAIC, lambda: by_default(work, bench, seconds))


def _none_of(variants: tuple[str, ...], reason: object) -> Iterator[Figure]:
    yield from (missing_figure("step_ms", reason, {"variant": variant}) for variant in variants)


def _by_hand(even: Plan, rounds: Rounds) -> Iterator[Figure]:
    """Runs the even split on each kind of lanes."""
    work, bench, by = rounds.work, rounds.bench, {"plan": BY_HAND}
    plain, eager, graphs, targeted = EVEN_VARIANTS
    bench.notes.append(f"{BY_HAND}: {_plan_text(even)}")

    def lanes(*, sm_target: bool = False, captured: bool = False) -> Variant:
        return colocated(work, even, lanes_of(bench, sm_target=sm_target), graphs=captured)

    yield from rounds.measure(plain, lambda: colocated(work, even, PlainStreams(bench.backend)), by)
    yield from rounds.measure(eager, lanes, by)
    yield from rounds.measure(graphs, lambda: lanes(captured=True), by, captures=True)
    won = rounds.won(graphs, over=eager)
    by = by | {"launching": "captured" if won else "eager"}
    yield from rounds.measure(targeted, lambda: lanes(sm_target=True, captured=won), by, captures=won)


def even_plan(graph: ModuleGraph, device: Device) -> Plan:
    """Returns stages by depth in the graph, each with the slots in equal parts."""
    slots = device.num_slots
    stages = []
    for names in graph.levels:
        for first in range(0, len(names), slots):
            group = names[first : first + slots]
            stages.append({name: slots // len(group) for name in group})
    return plan_from_quotas(stages, graph=graph, device=device)


def _plan_text(plan: Plan) -> str:
    stages = (" | ".join(f"{p.module} {p.quota}" for p in stage.placements) for stage in plan.stages)
    return " ; ".join(stages)


def _bound(work: Workload, bench: Bench) -> Iterator[Figure]:
    """Yields operations and bytes of a step, and the roofline's bound.

    Arithmetic is that of matrix products, convolutions and attention. Traffic is a lower bound: each weight is read in
    both passes, its gradient is written and read, the optimizer touches its state once, and what is kept for backward
    is written once and read once.
    """
    try:
        counts = count_module(work.model, (), work.inputs, target="cuda", autocast=torch.bfloat16)
        with FlopCounterMode(display=False) as counter:  # counts only what a step needs
            work.loss().backward()
        work.model.zero_grad(set_to_none=True)
    except Exception as error:  # becomes the reason of a figure
        yield missing_figure("bound_ms", error, source="predicted")
        return
    tflop = counter.get_total_flops() / 1e12
    trained = sum(p.numel() for p in work.model.parameters() if p.requires_grad)
    memory = counts.memory
    moved_gb = (2 * memory.parameter_bytes + trained * (4 + ADAMW_BYTES) + 2 * memory.activation_bytes) / 1e9
    values = {"step_tflop": tflop, "step_moved_gb": moved_gb, "parameters_billion": trained / 1e9}
    tflops, gb_per_s = (bench.value_of("ceilings", name) for name in ("bf16_tflops", "copy_gb_per_s"))
    if tflops is None or gb_per_s is None:
        yield missing_figure("bound_ms", "the ceilings were not measured", source="predicted")
    else:
        values["bound_ms"] = 1e3 * max(tflop / tflops, moved_gb / gb_per_s)
    yield from (Figure(name=name, source="predicted", value=value, labels={}) for name, value in values.items())


def measure_ceilings(bench: Bench) -> Iterator[Figure]:
    """Measures a large matrix product in half precision, and a large copy."""
    device, dtype = bench.torch_device, half_type(bench.torch_device)
    size, count = (64, 1 << 12) if bench.dry_run else (8192, 1 << 30)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = _times_ms(bench, lambda: torch.mm(left, right, out=out))
    yield median_figure("bf16_tflops", [2.0 * size**3 / ms / 1e9 for ms in times], labels={"size": str(size)})
    source = torch.ones(count, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    times = _times_ms(bench, lambda: target.copy_(source))
    yield median_figure(
        "copy_gb_per_s", [2.0 * source.nbytes / ms / 1e6 for ms in times], labels={"bytes": str(source.nbytes)}
    )


def _times_ms(bench: Bench, call: Callable[[], object]) -> list[float]:
    for _ in range(3):
        call()
    times = (_step_ms(call, bench, 4)[0] for _ in range(3 if bench.dry_run else 12))  # type: ignore[arg-type]
    return [max(1e-6, ms) for ms in times]
