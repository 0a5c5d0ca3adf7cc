"""Simulated steps of PipeWeaver's and Cornstarch's models on their described devices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bench.papers.baselines import PAPER_BASELINES
from bench.papers.data_sets import IMAGE_MIXTURE, VIDEO_MIXTURE, Microbatch, draw_step
from bench.papers.pipeline_layers import LayerStack
from bench.papers.pipeline_models import KNOWN_MODELS, KnownModel
from bench.record import Figure, missing_figure
from mosaic.errors import InfeasibleError
from mosaic.hardware import Cluster
from mosaic.pipelining.baselines import one_f_one_b
from mosaic.pipelining.cuts import balanced_ends, in_a_loop, partition_by
from mosaic.pipelining.layers import PipelineModel
from mosaic.pipelining.orders import OrderLimits, Searched, search_orders
from mosaic.pipelining.partition import Partition, Request, input_gradients, layer_ms, strategy_of
from mosaic.pipelining.planner import PlannedStep, PlannerOptions, contend, plan_step
from mosaic.pipelining.task_graph import RankSpace, task_graph
from mosaic.pipelining.tasks import Timed, roll_out, simulate

STEPS_FOR_PARTITION = 4
"""Steps of other seeds that stand for those to come when a partition is made: none sees the step that it runs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model of a paper on the paper's devices."""

    name: str
    num_microbatches: int = 16
    with_memory: bool = True
    """True if ranks have the devices' memory; False: unlimited memory."""

    @property
    def known(self) -> KnownModel:
        return KNOWN_MODELS[self.name]

    @cached_property
    def cluster(self) -> Cluster:
        return self.known.cluster()

    @cached_property
    def model(self) -> PipelineModel:
        return self.known.model()

    @property
    def space(self) -> RankSpace:
        degrees = self.known.degrees
        return RankSpace(
            network=self.cluster,
            devices_per_rank=degrees.tensor * degrees.context,
            limit_bytes=self.cluster.hardware.memory_bytes if self.with_memory else 0,
        )

    def step(self, seed: int) -> tuple[Microbatch, ...]:
        if self.known.is_frozen:
            return (self.known.sample(),) * self.num_microbatches
        mixture = VIDEO_MIXTURE if self.known.video else IMAGE_MIXTURE
        return draw_step(mixture, num_microbatches=self.num_microbatches, seed=seed)

    @cached_property
    def request(self) -> Request:
        """Request for partitions, made for other steps than those that run."""
        seen = [each for seed in range(STEPS_FOR_PARTITION) for each in self.step(10_000 + seed)]
        return Request(model=self.model, num_ranks=self.known.degrees.pipeline, microbatches=seen)

    def plan(self, step: Sequence[Microbatch], options: PlannerOptions) -> PlannedStep:
        return plan_step(self.request, step, space=self.space, options=options)

    def contend(self, step: Sequence[Microbatch], names: Sequence[str]) -> dict[str, PlannedStep | str]:
        return contend(
            replace(self.request, chunks_per_rank=2), step, space=self.space, names=names, table=PAPER_BASELINES
        )

    def mfu(self, step: Sequence[Microbatch], step_ns: float) -> float:
        """Returns the model's operations over the peak of the pipeline's devices in that time: no recomputation."""
        flops = sum(
            3 * module.forward_flops(microbatch, units)
            for module in self.model.modules
            for microbatch in step
            if isinstance(module, LayerStack) and (units := module.units(microbatch))
        )
        degrees = self.known.degrees
        devices = degrees.tensor * degrees.pipeline * degrees.context
        return flops / (devices * self.cluster.hardware.bf16_tflops * 1e12 * step_ns / 1e9)


def options(seconds: float, partition: str = "separated") -> PlannerOptions:
    """Returns options with a limit of wall time on one thread; PipeWeaver separates modules."""
    return PlannerOptions(partition=partition, limits=OrderLimits(effort=seconds))


def simulated(name: str, values: Sequence[float]) -> Figure:
    """Returns the mean of several steps, each a sample."""
    return Figure(name=name, source="simulated", value=sum(values) / len(values), samples=tuple(values))


def ratios(
    of: str, plans: Sequence[PlannedStep], others: Sequence[Mapping[str, PlannedStep | str]], *, what: str
) -> Iterator[Figure]:
    """Gives each baseline's step over the planned one's, of the same steps; one that cannot run has its reason."""
    for baseline in others[0]:
        name = f"{of}: {baseline}: {what}, ratio"
        shares = []
        for plan, contenders in zip(plans, others, strict=True):
            if isinstance(rival := contenders[baseline], str):
                yield missing_figure(name, rival, source="simulated")
                break
            shares.append(rival.makespan_ns / plan.makespan_ns)
        else:
            yield simulated(name, shares)


RIVALS = ("megatron", "nnscaler*", "optimus-coarse")
"""Those that PipeWeaver compares with; Optimus knows no decoders."""
OWN = "any partition"
"""The default of ``plan_step``; ``planned`` is PipeWeaver's way: separated modules."""


def figure_9a(names: Sequence[str], seeds: Sequence[int], seconds: float) -> Iterator[Figure]:
    """Baselines' steps over the planned one's."""
    for name in names:
        job = Job(name=name)
        steps = [job.step(seed) for seed in seeds]
        plans = [job.plan(step, options(seconds)) for step in steps]
        yield simulated(f"Fig. 9a: {name}: planned: step, s", [plan.makespan_ns / 1e9 for plan in plans])
        pairs = list(zip(steps, plans, strict=True))
        yield simulated(f"Fig. 9a: {name}: planned: MFU", [job.mfu(step, plan.makespan_ns) for step, plan in pairs])
        yield simulated(f"Fig. 9a: {name}: planned: above its bound, %", [100 * plan.gap for plan in plans])
        own = [job.plan(step, options(seconds, PlannerOptions().partition)) for step in steps]
        shares = [other.makespan_ns / plan.makespan_ns for other, plan in zip(own, plans, strict=True)]
        yield simulated(f"Fig. 9a: {name}: {OWN}: step over the planned one's, ratio", shares)
        rivals = [job.contend(step, (*RIVALS, "1f1b", "zb-v")) for step in steps]
        yield from ratios(f"Fig. 9a: {name}", plans, rivals, what="step over the planned one's")


def figure_12(name: str, seeds: Sequence[int], seconds: Sequence[float], threads: int) -> Iterator[Figure]:
    """The gap to the bound of PipeWeaver's search and of ours after so many seconds, without limits of memory."""
    job = Job(name=name, with_memory=False)
    partition = partition_by("separated", job.request)
    graphs = [task_graph(job.model, partition, job.step(seed), job.space) for seed in seeds]
    for method in ("tree", "shifts"):
        limits = OrderLimits(effort=2 * max(seconds), seconds=max(seconds), threads=threads)  # the clock decides
        searches = [search_orders(graph, method=method, limits=limits) for graph in graphs]
        for limit in seconds:
            gaps = []
            for search in searches:
                assert isinstance(search, Searched)
                reached = min(
                    time_ns for at, time_ns in search.progress if at <= limit or time_ns == search.progress[0][1]
                )
                gaps.append(100 * (reached / search.bound_ns - 1))
            yield simulated(f"Fig. 12: {name}: {method}, {limit:g} s: above the bound, %", gaps)


def figure_14(names: Sequence[str], seconds: float, num_microbatches: int = 64) -> Iterator[Figure]:
    """Models of thousands of GPUs: operations over the peak, and Megatron-LM's step over the planned one's."""
    for name in names:
        job = Job(name=name, num_microbatches=num_microbatches)
        step = job.step(0)
        try:
            plan = job.plan(step, options(seconds))
        except InfeasibleError as error:
            yield missing_figure(f"Fig. 14: {name}: planned: MFU", error, source="simulated")
            continue
        yield simulated(f"Fig. 14: {name}: planned: MFU", [job.mfu(step, plan.makespan_ns)])
        yield simulated(f"Fig. 14: {name}: planned: above its bound, %", [100 * plan.gap])
        yield from ratios(f"Fig. 14: {name}", [plan], [job.contend(step, RIVALS)], what="step over the planned one's")


def cornstarch_frozen(text: str) -> Iterator[Figure]:
    """1F1B of parts that are balanced with and without knowledge of frozen modules (Tables 3, 10 and 11)."""
    at = {"s": "Table 10", "m": "Table 3", "l": "Table 11"}[text]
    for name in ("vlm-s", "vlm-m", "vlm-l", "alm-s", "alm-m", "alm-l"):
        job = Job(name=f"cornstarch-{name}-llm-{text}", num_microbatches=24)
        aware, unaware = (_by_1f1b(job, _balanced(job, is_aware=is_aware)) for is_aware in (True, False))
        yield _ratio(f"Cornstarch {at}: {name}: unaware of what is frozen over aware, ratio", unaware, aware)


def _balanced(job: Job, *, is_aware: bool) -> Partition:
    """Returns layers that recompute, balanced by their time, or as if all had gradients that take twice as long."""
    microbatch, times_ms = job.known.sample(), []
    gradients = input_gradients(job.model, {module.name for module in job.model.modules})
    for module in job.model.modules:
        layers = module.layers(microbatch, module.units(microbatch))
        for layer, inputs, weights in zip(layers, gradients[module.name], module.trains, strict=True):
            again = strategy_of(layer, "recompute")
            times = 3 * layer.forward_ms, again.extra_forward_ms, again.extra_backward_ms
            times_ms.append(math.fsum(layer_ms(layer, again, inputs=inputs, weights=weights) if is_aware else times))
    return in_a_loop(job.request, balanced_ends(times_ms, job.request.num_ranks))


def _by_1f1b(job: Job, partition: Partition) -> int | None:
    space = replace(job, with_memory=False).space
    graph = task_graph(job.model, partition, job.step(0), space, strategies="recompute")
    (orders,) = one_f_one_b(graph, partition)
    played = simulate(graph, orders)
    return played.makespan_ns if isinstance(played, Timed) else None


def _ratio(name: str, numerator: float | None, denominator: float | None) -> Figure:
    if numerator is None or not denominator:
        return missing_figure(name, "its memory does not hold", source="simulated")
    return simulated(name, [numerator / denominator])


def large_step(name: str, num_microbatches: int, seconds: float) -> Iterator[Figure]:
    """A step of thousands of GPUs: simulated, and planned."""
    began = time.perf_counter()
    job = Job(name=name, num_microbatches=num_microbatches)
    step = job.step(0)
    partition = partition_by("separated", job.request)
    graph = task_graph(job.model, partition, step, job.space, strategies="recompute")
    roll_out(graph)
    tasks = {"tasks": str(len(graph.tasks))}
    took = time.perf_counter() - began
    yield Figure(name=f"{name}: step from nothing, simulated, s", source="measured", value=took, labels=tasks)
    began = time.perf_counter()
    try:
        job.plan(step, options(seconds))
    except InfeasibleError as error:
        yield missing_figure(f"{name}: planned with {seconds:g} s of search, s", error)
        return
    took = time.perf_counter() - began
    yield Figure(name=f"{name}: planned with {seconds:g} s of search, s", source="measured", value=took, labels=tasks)
