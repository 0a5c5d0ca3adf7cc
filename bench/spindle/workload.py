"""Spindle's workloads as Spindle has them: each task a flow of its own, whose modules share parameters with others'.

A step of Mosaic's zoo runs an encoder once over the rows of all tasks. Spindle's paper (arXiv 2409.03365, sections 2
and 3.1) has an operator for each task instead, so that an encoder of several tasks is there several times. Here a
module is named ``TASK/MODULE``; its operators are counted at its task's own batch.

Parameters are shared, and their gradients are summed over tasks before they are summed over devices (section 3.6). So
each of k modules with the same parameters is taken to hold, and to send, a k-th of them: exact where all have the same
devices, too little memory where they have not; k small messages have more latency than one large one. The same for
all planners. The batches are ours, since the paper does not tell its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from mosaic.cli.counting import Counted, count_workload
from mosaic.cli.workload import load_workload
from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.communication import ModuleTraffic, RankedCost
from mosaic.cost.counts import MemoryCounts, ModuleCounts
from mosaic.device import Device
from mosaic.graph import Edge, ModuleGraph
from mosaic.hardware import Cluster, find_cluster
from mosaic.models import find_model
from mosaic.models.rows import CLIP_TASKS
from mosaic.solver.task import PlannerSettings

DEVICE = "a100-80g"
"""Spindle measured on A800s (section 5.1): A100s but for their links."""
NVLINK_GB_PER_S = 200.0
"""Of an A800 in one direction; 400 both ways in its data sheet."""
NODE_GB_PER_S = 50.0
"""Between nodes: "400 Gbps InfiniBand", which we read as what a node has in all."""
TASKS: Mapping[str, tuple[str, ...]] = {
    name: find_model(name).tasks for name in ("multitask-clip", "multitask-ofasys", "qwen-val")
}
"""Tasks of each model, in the order in which they join."""
EACH_ENCODER_ONCE = ("image_thermal", "text_imu", "audio_depth")
"""Tasks of Multitask-CLIP that have all of its encoders between them."""

BYTES = 2
"""Of an activation, in 16 bits."""
Counts = Mapping[int, ModuleCounts]
"""Of a module, by data-parallel degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Which sizes of the models, and how much of each."""

    size: str
    """Size in the zoo."""
    batch: int
    """Samples of each task."""
    degrees: tuple[int, ...]
    """Data-parallel degrees that are counted."""


PUBLISHED = Scale(size="spindle", batch=64, degrees=(1, 2, 4, 8, 16, 32, 64))
TINY = Scale(size="tiny", batch=8, degrees=(1, 2, 4, 8))
"""For tests and the quick form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks of one model that are trained together."""

    model: str
    """Name in the zoo."""
    size: str
    """Its size."""
    tasks: tuple[str, ...]
    """Names of the tasks."""
    graph: ModuleGraph
    """The modules of all tasks; those of one do not wait for those of another."""
    counts: Mapping[str, Counts]
    """What each does."""
    settings: PlannerSettings
    """Layers, as planners take them."""
    task_names: tuple[tuple[str, ...], ...]
    """Modules of each task."""
    parameters: Mapping[str, str]
    """For each module the name of its parameters, which several may share."""
    layer_bytes: Mapping[str, int]
    """Bytes of a whole batch between two layers of modules, where known."""

    def on(self, num_devices: int) -> tuple[RankedCost, Device, Cluster]:
        """Returns its cost model on a cluster; a device as a plan has it; and the cluster.

        A module's backward hides the sums of its own gradients as far as it can. Rows do not travel: tasks have data
        of their own, and what slices send each other is worked out apart (``sends.py``).

        The device has no limit on memory: the cost model has no tensor parallelism, no sharded optimizer and no
        recomputation, without which QWen-VAL fits on no device.
        """
        cluster = cluster_of(num_devices)
        base = AnalyticCost(self.counts, cluster)
        traffic = {
            name: ModuleTraffic(parameter_gradients=next(iter(own.values())).memory.gradient_bytes)
            for name, own in self.counts.items()
        }
        cost = RankedCost(base, traffic, cluster, num_devices, included_ms=base.communication_ms)
        return cost, replace(cluster.hardware.device(), memory_bytes=0), cluster


def cluster_of(num_devices: int) -> Cluster:
    """Returns nodes like those that Spindle measured on."""
    found = find_cluster(DEVICE, num_devices)
    return replace(
        found,
        nics_per_node=1,
        intra_node=replace(found.intra_node, gb_per_s=NVLINK_GB_PER_S),
        inter_node=replace(found.inter_node, gb_per_s=NODE_GB_PER_S),
    )


def workload(model: str, tasks: Sequence[str], scale: Scale) -> Workload:
    """Returns tasks of a model, counted."""
    size = scale.size
    flows = {task: _counted(model, size, task, scale) for task in tasks}
    sharing = Counter(name for graph, _ in flows.values() for name in graph.names)
    modules, edges, counts, parameters, layers = [], [], {}, {}, {}
    for task, (graph, own) in flows.items():
        for module in graph.modules:
            name = f"{task}/{module.name}"
            modules.append(replace(module, name=name))
            counts[name] = {degree: _shared(found, sharing[module.name]) for degree, found in own[module.name].items()}
            parameters[name] = module.name
            layers[name] = _layers(model, size, task, scale.batch)[module.name]
        edges += [
            Edge(source=f"{task}/{edge.source}", target=f"{task}/{edge.target}", num_bytes=edge.num_bytes)
            for edge in graph.edges
        ]
    return Workload(
        model=model,
        size=size,
        tasks=tuple(tasks),
        graph=ModuleGraph(modules=tuple(modules), edges=tuple(edges)),
        counts=counts,
        settings=PlannerSettings(num_layers={name: own.count for name, own in layers.items()}),
        task_names=tuple(tuple(f"{task}/{name}" for name in graph.names) for task, (graph, _) in flows.items()),
        parameters=parameters,
        layer_bytes={name: own.num_bytes for name, own in layers.items() if own.num_bytes},
    )


@cache
def _counted(model: str, size: str, task: str, scale: Scale) -> tuple[ModuleGraph, Mapping[str, Counts]]:
    """A task by itself; an encoder of Multitask-CLIP does the same in all its tasks and is counted once."""
    if model != "multitask-clip":
        counted = _count(model, size, (task,), scale)
        return counted.graph, counted.counts
    counted = _count(model, size, EACH_ENCODER_ONCE, scale)
    names = tuple(f"encoders.{modality}" for modality in CLIP_TASKS[task].reads)
    modules = tuple(module for module in counted.graph.modules if module.name in names)
    return ModuleGraph(modules=modules), {name: counted.counts[name] for name in names}


@cache
def _count(model: str, size: str, tasks: tuple[str, ...], scale: Scale) -> Counted:
    return count_workload(f"zoo:{model}-{size}:{scale.batch}:{','.join(tasks)}", scale.degrees, kind="cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The equal consecutive layers of a module."""

    count: int = 1
    """How many."""
    num_bytes: int = 0
    """What one hands to the next, of a whole batch in 16 bits."""


@cache
def _layers(model: str, size: str, task: str, batch: int) -> Mapping[str, Layers]:
    """Of every module its longest list of children of one class, as seen in a forward on tensors without data."""
    made = load_workload(f"zoo:{model}-{size}:{batch}:{task}", device=torch.device("meta"))
    made_bytes: dict[nn.Module, int] = {}

    def note(layer: nn.Module, _: object, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor):
            made_bytes[layer] = BYTES * tensor.numel()

    lists = {name: _longest_list(module) for name, module in made.model.named_modules()}
    hooks = [own[0].register_forward_hook(note) for own in lists.values() if own]
    made.call()
    for hook in hooks:
        hook.remove()
    return {
        name: Layers(count=len(own), num_bytes=made_bytes.get(own[0], 0)) if own else Layers()
        for name, own in lists.items()
    }


def _longest_list(module: nn.Module) -> list[nn.Module]:
    lists = [list(child) for child in module.modules() if isinstance(child, nn.ModuleList | nn.Sequential)]
    return max((own for own in lists if len({type(child) for child in own}) == 1), key=len, default=[])


def _shared(found: ModuleCounts, num_modules: int) -> ModuleCounts:
    """The counts of one of several modules that have their parameters in common."""
    memory = found.memory
    return replace(found, memory=replace(memory, **{name: getattr(memory, name) // num_modules for name in _RESIDENT}))


_RESIDENT = ("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes")
assert set(_RESIDENT) <= set(MemoryCounts.__dataclass_fields__)
