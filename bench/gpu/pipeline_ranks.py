"""A pipeline on one GPU: ranks are threads of one process, each with a copy of the model and its own stream.

It tests schedules and messages between streams on CUDA, and measures the executor's overhead. It cannot show a
speed-up, because ranks share the GPU and Python launches for one rank at a time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from bench.gpu.bench import Bench
from bench.pipeline.in_process import InProcess, InProcessTransport
from bench.pipeline.measured.models import MODELS, Microbatch
from bench.record import Figure, median_figure
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import PlannerOptions, plan_baseline, plan_step
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.pipelining.task_graph import RankSpace
from mosaic.ranks.pipeline.chunk_work import ChunkWork, StepData
from mosaic.ranks.pipeline.counting import count_model
from mosaic.ranks.pipeline.executor import Executor

PLAIN, PLANNED, BASELINE = "plain loop", "planned", "1f1b"
RANKS = 2
Gradients = dict[str, Tensor]


def measure_pipeline_ranks(bench: Bench, *, name: str = "llava") -> Iterator[Figure]:
    """Measures steps of one model as a plain loop and in a pipeline of two ranks, in turn, and compares gradients."""
    width, layers, microbatches, rounds = (64, 2, 2, 1) if bench.dry_run else (1024, 8, 8, 6)
    model = MODELS[name].model(width, layers).to(bench.torch_device)
    step = [
        {key: value.to(bench.torch_device) for key, value in microbatch.items()}
        for microbatch in MODELS[name].step(0, microbatches)
    ]
    cluster = find_cluster("h100-80g" if bench.on_gpu else "host", RANKS)
    split = find_split(model, step[0], loss=lambda output: output.loss)
    counted = count_model(model, split, step[0], RankHardware(cluster=cluster))
    sizes = [counted.microbatch(microbatch) for microbatch in step]
    request, space = Request(model=counted.model, num_ranks=RANKS, microbatches=sizes), RankSpace(network=cluster)
    options = PlannerOptions(limits=OrderLimits(effort=0.2 if bench.dry_run else 1.0))
    plans = {
        PLANNED: plan_step(request, sizes, space=space, options=options),
        BASELINE: plan_baseline(BASELINE, request, sizes, space=space),
    }
    expected = _plain_step(model, step)
    model.zero_grad()
    copies = [copy.deepcopy(model) for _ in range(RANKS)]

    def program(transport: InProcessTransport) -> tuple[dict[str, list[float]], dict[str, Gradients]]:
        """Runs steps of the variants in turn; returns times of the timed rounds, and this rank's first gradients."""
        own, executor = copies[transport.rank], Executor(transport)
        runs: dict[str, Callable[[], object]] = {PLAIN: lambda: _plain_step(own, step)} if transport.rank == 0 else {}
        for variant, plan in plans.items():
            parted = PartedModel(own, counted.split, [chunk.parts for chunk in plan.partition.chunks])
            data = StepData(
                split=counted.split,
                partition=plan.partition,
                schedule=plan.schedule(),
                microbatches=step,
                layers=counted.layers,
                averaged_over=len(step),
            )
            runs[variant] = lambda parted=parted, data=data: executor.run(
                data.schedule, ChunkWork(parted, lambda output, _: output.loss, data, states=[None] * len(step))
            )
        times_ms: dict[str, list[float]] = {variant: [] for variant in runs}
        gradients: dict[str, Gradients] = {}
        with torch.cuda.stream(torch.cuda.Stream(bench.torch_device)) if bench.on_gpu else nullcontext():
            for number in range(1 + rounds):  # the first one warms up
                for variant, run in runs.items():
                    own.zero_grad()
                    if variant != PLAIN:
                        transport.all_gather(variant)  # both ranks start together
                    began = time.perf_counter()
                    run()
                    if bench.on_gpu:
                        torch.cuda.current_stream().synchronize()
                    if variant != PLAIN:
                        transport.all_gather(variant)  # and the step ends with the later one
                    took_ms = 1e3 * (time.perf_counter() - began)
                    if number:
                        times_ms[variant].append(took_ms)
                    else:
                        gradients[variant] = _gradients(own)
        return times_ms, gradients

    ranks = InProcess(RANKS).run(program)
    times_ms, labels = ranks[0][0], {"model": name, "ranks": str(RANKS)}
    for variant, samples in times_ms.items():
        yield median_figure("step_ms", samples, labels=labels | {"variant": variant})
    for variant in plans:
        ratios = [ours / plain for ours, plain in zip(times_ms[variant], times_ms[PLAIN], strict=True)]
        yield median_figure("step over the plain loop's, ratio", ratios, labels=labels | {"variant": variant})
        parts = [gradients[variant] for _, gradients in ranks]
        yield Figure(
            name="gradients against the plain loop's, largest relative difference",
            source="measured",
            value=max(_difference([part[key] for part in parts if key in part], g) for key, g in expected.items()),
            labels=labels | {"variant": variant},
        )
    if not bench.on_gpu:
        bench.notes.append("ranks are threads on CPU cores")


def _plain_step(model: nn.Module, step: Sequence[Microbatch]) -> Gradients:
    for microbatch in step:
        (model(**microbatch).loss / len(step)).backward()
    return _gradients(model)


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}


def _difference(parts: Sequence[Tensor], expected: Tensor) -> float:
    """Returns the relative difference of the summed gradients of ranks; 1 if one is missing."""
    if not parts:
        return float(expected.norm() > 0)
    difference = torch.stack(list(parts)).sum(0) - expected
    return float(difference.norm() / (1e-5 + expected.norm()))  # gradients of key biases are only rounding errors
