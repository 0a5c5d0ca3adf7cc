"""Spindle's own workloads under every planner, by one cost model (arXiv 2409.03365, Fig. 8 and 12).

``python -m bench.papers.spindle [--quick] [--json FILE]``

Multitask-CLIP with 4, 7 and 10 tasks, OFASys with 4 and 7, QWen-VAL with 3, on 8 to 64 described A100s with an A800's
links. Operators are counted and steps are simulated; ``megatron`` stands for Megatron-LM and DeepSpeed. The times of
planning are measured. ``--quick`` takes tiny models; its numbers only say that the study works.

A step of Mosaic's zoo runs an encoder once over the rows of all tasks. Spindle has an operator for each task instead
(sections 2 and 3.1), so a module is named ``TASK/MODULE`` here. Gradients of shared parameters are summed over tasks
before devices (section 3.6), so each of k modules with the same parameters holds and sends a k-th of them. The paper
does not print its batches. No device limits memory: the cost model has no tensor parallelism and no recomputation,
without which QWen-VAL fits on no device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from bench.harness import PartedStudy, StudyPart
from bench.papers.printed import printed
from bench.ranks.simulated import planned_steps
from bench.record import Figure, Source, missing_figure
from mosaic.cli.counting import Counted, count_workload
from mosaic.cli.workload import load_workload
from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.communication import ModuleTraffic, RankedCost
from mosaic.cost.counts import ModuleCounts
from mosaic.graph import Edge, ModuleGraph
from mosaic.hardware import Cluster, find_cluster
from mosaic.models import find_model
from mosaic.models.rows import CLIP_TASKS
from mosaic.solver import SearchOptions
from mosaic.solver.limits import SearchLimits
from mosaic.solver.task import PlannerSettings

METHODS = ("megatron", "distmm", "spindle", "exact", "auto")
BASE = "megatron"
DEVICE = "a100-80g"
NVLINK_GB_PER_S = 200.0
"""An A800's, in one direction."""
NODE_GB_PER_S = 50.0
"""Between nodes: "400 Gbps InfiniBand"."""
TASKS = {name: find_model(name).tasks for name in ("multitask-clip", "multitask-ofasys", "qwen-val")}
EACH_ENCODER_ONCE = ("image_thermal", "text_imu", "audio_depth")
"""Tasks of Multitask-CLIP that have all of its encoders between them."""
_RESIDENT = ("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes")
Counts = Mapping[int, ModuleCounts]
"""Of a module, by data-parallel degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    size: str
    """Size in the zoo."""
    batch: int
    """Samples of each task."""
    degrees: tuple[int, ...]


PUBLISHED = Scale(size="spindle", batch=64, degrees=(1, 2, 4, 8, 16, 32, 64))
LARGER = replace(PUBLISHED, batch=128)
"""For Multitask-CLIP: at half of it launches bind Megatron-LM, which gains nothing from 16 to 32 GPUs."""
TINY = Scale(size="tiny", batch=8, degrees=(1, 2, 4, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks of one model that are trained together; those of one do not wait for those of another."""

    graph: ModuleGraph
    counts: Mapping[str, Counts]
    settings: PlannerSettings

    def on(self, num_devices: int) -> tuple[RankedCost, Cluster]:
        """Returns the cost model on a cluster; a backward hides the sums of its own gradients as far as it can."""
        cluster = cluster_of(num_devices)
        base = AnalyticCost(self.counts, cluster)
        traffic = {
            name: ModuleTraffic(parameter_gradients=next(iter(own.values())).memory.gradient_bytes)
            for name, own in self.counts.items()
        }
        return RankedCost(base, traffic, cluster, num_devices, included_ms=base.communication_ms), cluster


def cluster_of(num_devices: int) -> Cluster:
    """Returns nodes like those that Spindle measured on."""
    cluster = find_cluster(DEVICE, num_devices)
    return replace(
        cluster,
        nics_per_node=1,
        intra_node=replace(cluster.intra_node, gb_per_s=NVLINK_GB_PER_S),
        inter_node=replace(cluster.inter_node, gb_per_s=NODE_GB_PER_S),
    )


def workload(model: str, tasks: Sequence[str], scale: Scale) -> Workload:
    flows = {task: _counted(model, task, scale) for task in tasks}
    sharing = Counter(name for graph, _ in flows.values() for name in graph.names)
    modules, edges, counts, layers = [], [], {}, {}
    for task, (graph, own) in flows.items():
        num_layers = _num_layers(model, scale.size, task, scale.batch)
        for module in graph.modules:
            name = f"{task}/{module.name}"
            modules.append(replace(module, name=name))
            counts[name] = {degree: _share(each, sharing[module.name]) for degree, each in own[module.name].items()}
            layers[name] = num_layers[module.name]
        edges += [
            Edge(source=f"{task}/{edge.source}", target=f"{task}/{edge.target}", num_bytes=edge.num_bytes)
            for edge in graph.edges
        ]
    return Workload(
        graph=ModuleGraph(modules=tuple(modules), edges=tuple(edges)),
        counts=counts,
        settings=PlannerSettings(num_layers=layers),
    )


def _counted(model: str, task: str, scale: Scale) -> tuple[ModuleGraph, Mapping[str, Counts]]:
    """A task by itself; an encoder of Multitask-CLIP does the same in all its tasks and is counted once."""
    if model != "multitask-clip":
        counted = _count(model, (task,), scale)
        return counted.graph, counted.counts
    counted = _count(model, EACH_ENCODER_ONCE, scale)
    names = tuple(f"encoders.{modality}" for modality in CLIP_TASKS[task].reads)
    modules = tuple(module for module in counted.graph.modules if module.name in names)
    return ModuleGraph(modules=modules), {name: counted.counts[name] for name in names}


@cache
def _count(model: str, tasks: tuple[str, ...], scale: Scale) -> Counted:
    return count_workload(f"zoo:{model}-{scale.size}:{scale.batch}:{','.join(tasks)}", scale.degrees, kind="cuda")


@cache
def _num_layers(model: str, size: str, task: str, batch: int) -> Mapping[str, int]:
    """Returns the length of each module's longest list of children of one class, which Spindle slices."""
    loaded = load_workload(f"zoo:{model}-{size}:{batch}:{task}", device=torch.device("meta"))

    def longest(module: nn.Module) -> int:
        lists = [list(child) for child in module.modules() if isinstance(child, nn.ModuleList | nn.Sequential)]
        return max((len(own) for own in lists if len({type(child) for child in own}) == 1), default=1)

    return {name: longest(module) for name, module in loaded.model.named_modules()}


def _share(counts: ModuleCounts, num_modules: int) -> ModuleCounts:
    """Returns the counts of one of several modules that have their parameters in common."""
    memory = counts.memory
    return replace(counts, memory=replace(memory, **{name: getattr(memory, name) // num_modules for name in _RESIDENT}))


def speed_ups(
    model: str, num_tasks: Sequence[int], num_devices: Sequence[int], scale: Scale, seconds: float
) -> Iterator[Figure]:
    """Every planner's simulated step over Megatron-LM's (Fig. 8), and the time of planning (Fig. 12)."""
    highest: dict[tuple[str, str], float] = {}
    for count in num_tasks:
        tasks = workload(model, TASKS[model][:count], scale)
        for gpus in num_devices:
            of = f"{model} ({scale.size}), {count} tasks, {gpus} GPUs"
            cost, cluster = tasks.on(gpus)
            device = replace(cluster.hardware.device(), memory_bytes=0)
            search = SearchOptions(limits=SearchLimits(effort=seconds), hold_memory=False, planners=tasks.settings)
            planned = planned_steps(METHODS, tasks.graph, cost, device, num_devices=gpus, search=search)
            steps_ms = {method: step for method, (step, _) in planned.items() if isinstance(step, float)}
            for method, (step, took_s) in planned.items():
                if isinstance(step, str):
                    yield missing_figure(f"Fig. 8: {method}: step, {of}, ms", step, source="simulated")
                else:
                    yield _figure(f"Fig. 8: {method}: step, {of}, ms", step)
                    yield _figure(f"Fig. 12: {method}: planning, {of}, s", took_s, "measured")
            for method, step_ms in steps_ms.items():
                if BASE in steps_ms and method != BASE:
                    ratio = steps_ms[BASE] / step_ms
                    yield _figure(f"Fig. 8: {method}: speed-up over {BASE}, {of}", ratio)
                    for where in (f"{gpus} GPUs", "any GPUs"):
                        highest[method, where] = max(ratio, highest.get((method, where), 0.0))
    paper = printed("spindle", "Fig. 8")
    for (method, where), ratio in highest.items():
        name = f"Fig. 8: {method}: highest speed-up over {BASE}, {model}, any tasks, {where}"
        claimed = paper.get(method if where == "any GPUs" else f"{method}, {model}, {where}", "")
        yield _figure(name, ratio, paper=claimed)


def _figure(name: str, value: float, source: Source = "simulated", *, paper: str = "") -> Figure:
    return Figure(name=name, source=source, value=value, labels={"paper": paper} if paper else {})


STUDY = PartedStudy(
    name="bench_spindle",
    quick=lambda: (StudyPart.alone("Multitask-CLIP", 60, lambda: speed_ups("multitask-clip", (3,), (4, 8), TINY, 1)),),
    quick_seconds=60.0,
    full=lambda: (
        StudyPart.alone("Multitask-CLIP", 600, lambda: speed_ups("multitask-clip", (4, 7, 10), (8, 16, 32), LARGER, 5)),
        StudyPart.alone("OFASys", 600, lambda: speed_ups("multitask-ofasys", (4, 7), (8, 16, 32), PUBLISHED, 5)),
        StudyPart.alone("QWen-VAL", 600, lambda: speed_ups("qwen-val", (3,), (16, 32, 64), PUBLISHED, 5)),
    ),
)

if __name__ == "__main__":
    STUDY.main(__doc__, "tiny models; within a minute on two cores")
