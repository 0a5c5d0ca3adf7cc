"""A pipeline on one GPU: ranks are threads of one process, each with a copy of the model and a stream of its own.

What it can show is that schedules, messages between streams and late weights are right on CUDA, and what the executor
costs there. It cannot show a gain: ranks share the GPU, and Python launches for one of them at a time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

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
from mosaic.pipelining.planner import PlannedStep, PlannerOptions, plan_baseline, plan_step
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.pipelining.task_graph import RankSpace
from mosaic.ranks.pipeline.chunk_work import ChunkWork, StepData
from mosaic.ranks.pipeline.counting import CountedModel, count_model
from mosaic.ranks.pipeline.executor import Executor

PLAIN, PLANNED, RIVAL = "plain loop", "planned", "1f1b"
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One model, one step, and ways to run it."""

    model: nn.Module
    counted: CountedModel
    step: Sequence[Microbatch]
    plans: Mapping[str, PlannedStep]
    rounds: int

    @classmethod
    def make(cls, bench: Bench, name: str) -> _Job:
        width, layers, microbatches, rounds = (64, 2, 2, 1) if bench.dry_run else (1024, 8, 8, 6)
        found = MODELS[name]
        model = found.model(width, layers).to(bench.torch_device)
        step = [
            {key: value.to(bench.torch_device) for key, value in one.items()} for one in found.step(0, microbatches)
        ]
        cluster = find_cluster("h100-80g" if bench.on_gpu else "host", RANKS)
        counted = count_model(model, find_split(model, step[0]), step[0], RankHardware(cluster=cluster))
        seen = [counted.microbatch(one) for one in step]
        request, space = Request(model=counted.model, num_ranks=RANKS, microbatches=seen), RankSpace(network=cluster)
        options = PlannerOptions(limits=OrderLimits(effort=0.2 if bench.dry_run else 1.0))
        plans = {
            PLANNED: plan_step(request, seen, space=space, options=options),
            RIVAL: plan_baseline(RIVAL, request, seen, space=space),
        }
        return cls(model=model, counted=counted, step=step, plans=plans, rounds=rounds)


def measure_pipeline_ranks(bench: Bench, *, name: str = "llava") -> Iterator[Figure]:
    """Measures steps of one model as a plain loop and in a pipeline of two ranks, in turn, and compares gradients."""
    job = _Job.make(bench, name)
    wanted = _plain_step(job.model, job.step)
    for one in job.model.parameters():
        one.grad = None
    copies = [copy.deepcopy(job.model) for _ in range(RANKS)]
    ranks = InProcess(RANKS)
    found = ranks.run(lambda transport: _Rank(bench, job, copies[transport.rank], transport).measure())
    times = found[0].step_ms
    labels = {"model": name, "ranks": str(RANKS)}
    for way, samples in times.items():
        yield median_figure("step_ms", samples, labels=labels | {"variant": way})
    for way in job.plans:
        ratios = [theirs / plain for theirs, plain in zip(times[way], times[PLAIN], strict=True)]
        yield median_figure("step over the plain loop's, ratio", ratios, labels=labels | {"variant": way})
        gradients = _summed([one.gradients[way] for one in found])
        yield Figure(
            name="gradients against the plain loop's, largest relative difference",
            source="measured",
            value=max(_difference(gradients.get(key), value) for key, value in wanted.items()),
            labels=labels | {"variant": way},
        )
    if not bench.on_gpu:
        bench.notes.append("ranks are threads on CPU cores")


@dataclass(kw_only=True)
class _Seen:
    step_ms: dict[str, list[float]]
    """By way, of the rounds that count, where this is the first rank."""
    gradients: dict[str, dict[str, Tensor]]
    """By way, of this rank's layers, on the CPU."""


class _Rank:
    def __init__(self, bench: Bench, job: _Job, model: nn.Module, transport: InProcessTransport) -> None:
        self._bench, self._job, self._model, self._transport = bench, job, model, transport
        split = job.counted.split
        self._executor = Executor(transport)
        self._parted = {
            way: PartedModel(model, split, [chunk.parts for chunk in plan.partition.chunks])
            for way, plan in job.plans.items()
        }

    def measure(self) -> _Seen:
        """Takes steps by each way in turn."""
        seen = _Seen(step_ms={way: [] for way in (PLAIN, *self._job.plans)}, gradients={})
        with self._stream():
            for at in range(1 + self._job.rounds):
                if self._transport.rank == 0:
                    self._note(seen, PLAIN, at, lambda: _plain_step(self._model, self._job.step))
                for way in self._job.plans:
                    self._note(seen, way, at, lambda way=way: self._run(way))  # type: ignore[misc]
                    seen.gradients[way] = _gradients(self._model) if at == 0 else seen.gradients[way]
        return seen

    def _note(self, seen: _Seen, way: str, at: int, run: Callable[[], object]) -> None:
        self._model.zero_grad()
        if way != PLAIN:
            self._transport.all_gather(way)  # both ranks begin together
        began = time.perf_counter()
        run()
        self._synchronize()
        if way != PLAIN:
            self._transport.all_gather(way)  # and the step ends with the later one
        if at:  # the first one warms up
            seen.step_ms[way].append(1e3 * (time.perf_counter() - began))

    def _run(self, way: str) -> None:
        plan, job = self._job.plans[way], self._job
        data = StepData(
            split=job.counted.split,
            partition=plan.partition,
            schedule=plan.schedule(),
            microbatches=job.step,
            layers=job.counted.layers,
            averaged_over=len(job.step),
        )
        self._executor.run(data.schedule, ChunkWork(self._parted[way], _loss, data))

    def _stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream(self._bench.torch_device)) if self._bench.on_gpu else nullcontext()

    def _synchronize(self) -> None:
        if self._bench.on_gpu:
            torch.cuda.current_stream().synchronize()


def _loss(output: Any, microbatch: Mapping[str, Any]) -> Tensor:
    found: Tensor = output.loss
    return found


def _plain_step(model: nn.Module, step: Sequence[Microbatch]) -> dict[str, Tensor]:
    for one in step:
        (model(**one).loss / len(step)).backward()
    return _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.detach().cpu() for name, one in model.named_parameters() if one.grad is not None}


def _summed(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for one in each for name in one}
    return {name: torch.stack([one[name] for one in each if name in one]).sum(0) for name in names}


def _difference(own: Tensor | None, wanted: Tensor) -> float:
    """Returns by how much a gradient differs, as a share of its length; 1 where it is missing."""
    if own is None:
        return float(wanted.norm() > 0)
    return float((own - wanted).norm() / (1e-5 + wanted.norm()))  # biases of keys have gradients of rounding alone
