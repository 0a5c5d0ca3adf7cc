"""Drafts of comparison planners: whole-device options, levels, and waves of jobs without devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from mosaic.cost import Cost
from mosaic.graph import ModuleGraph, Part
from mosaic.solver.exact.search import SearchLimits
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Machine

Node = TypeVar("Node", bound=Hashable)

Widths = tuple[DeploymentOption, ...]
"""Ways to deploy one module on whole devices, by rising degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """What the comparison planners need to know beyond the cost model."""

    num_layers: Mapping[str, int] = field(default_factory=dict)
    """Equal consecutive layers of modules, where known; Spindle slices between them."""
    default_layers: int = 1
    """Layers of every other module, which a graph does not record; 1 keeps modules whole, so that the plan can run."""
    tasks: tuple[tuple[str, ...], ...] = ()
    """Modules of each task, where a model has several; each module is in one. Planners that plan task by task take a
    model without tasks for one, and those that share devices among tasks take each of its modules for one."""
    layer_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a whole batch between two layers of modules, where known; by these, placement keeps slices near those
    before them."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """For modules that share their parameters with others, the name of these; placement brings them together."""
    slice_overhead_ms: float = 0.0
    """What a slice takes, in forward and again in backward, above its share of the module's time; a whole module's
    time holds its own launches already."""
    interpolation: Literal["speedup", "time"] = "speedup"
    """Between two degrees: Spindle's released code (speed-up), or the appendix's Eq. 11 (time)."""
    estimator: Literal["cost", "alpha-beta"] = "cost"
    """Which times Spindle allocates by: the cost model's at every degree, or its own estimate of them from powers of
    two (``estimator.py``). What its plan is predicted to take is the cost model's either way."""
    extend: bool = True
    """Whether Spindle's waves give idle devices to the runs they hold."""
    island_size: int = 8
    """Devices with fast links between them (a node); placement keeps a module inside one where it can."""
    placement: Literal["local", "sequential"] = "local"
    """Near data and parameters, or each wave's jobs on consecutive devices: what Spindle's ablation compares with."""

    def __post_init__(self) -> None:
        counts = (self.default_layers, self.island_size, *self.num_layers.values())
        if min(counts) < 1 or not 0 <= self.slice_overhead_ms < float("inf"):
            raise ValueError(
                f"{self}: layers and island_size are at least 1, slice_overhead_ms is finite and not negative"
            )
        for name, value, known in (
            ("interpolation", self.interpolation, ("speedup", "time")),
            ("estimator", self.estimator, ("cost", "alpha-beta")),
            ("placement", self.placement, ("local", "sequential")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; use {' or '.join(map(repr, known))}")

    def layers(self, module: str) -> int:
        """Returns of how many equal layers a module consists."""
        return self.num_layers.get(module, self.default_layers)

    def check_names(self, graph: ModuleGraph) -> None:
        """Raises ValueError where layers or tasks do not belong to the modules of a graph."""
        if unknown := sorted(set(self.num_layers) - set(graph.names)):
            raise ValueError(f"num_layers names {unknown}; the modules are {', '.join(graph.names)}")
        named = sorted(name for task in self.tasks for name in task)
        if named and named != sorted(graph.names):
            raise ValueError(f"tasks name {', '.join(named)}; name each module once: {', '.join(graph.names)}")
        task_of = {name: task for task in self.tasks for name in task}
        if crossing := [edge for edge in graph.edges if task_of and task_of[edge.source] != task_of[edge.target]]:
            raise ValueError(
                f"{crossing[0].source} of one task feeds {crossing[0].target} of another; tasks do not wait for each "
                "other: give the two as one task"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts that will run in turn on whole devices, not yet on particular ones."""

    parts: tuple[Part, ...]
    """In the order of their forward pass; more than one where a chain was contracted, or where a task is a job."""
    options: tuple[DeploymentOption, ...]
    """How the module of each of them is deployed; those of fewer devices run on some of the job's."""

    @property
    def names(self) -> tuple[str, ...]:
        """Modules that it runs parts of."""
        return tuple(part.module for part in self.parts)

    @property
    def degree(self) -> int:
        """Devices."""
        return max(option.degree for option in self.options)

    @property
    def kept_bytes(self) -> int:
        """What each of its devices keeps while other waves run, in bytes; a slice keeps its share."""
        each = zip(self.parts, self.options, strict=True)
        return sum(-(-option.kept_bytes * part.count // part.total) for part, option in each)

    @property
    def working_bytes(self) -> int:
        """What each of its devices works with beyond that, in bytes; a slice as much as its whole module."""
        return max(option.working_bytes for option in self.options)


DraftWave = tuple[Job, ...]
"""Jobs that run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """What a planner draws waves for."""

    graph: ModuleGraph
    """What feeds what."""
    widths: Mapping[str, Widths]
    """For each module its options."""
    cost: Cost
    """Times, memory and interference; a planner whose modules share no device needs none of the last."""
    machine: Machine
    """What there is to place on."""
    settings: PlannerSettings
    """Granularity of slices, tasks, and variants."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    """What ends the search of a planner that searches."""
    is_judged: bool = True
    """Whether its plan is somebody's answer, and no other search's start."""

    @property
    def num_devices(self) -> int:
        """Devices."""
        return self.machine.num_devices


Draw = Callable[[Sheet], Iterable[Sequence[DraftWave]]]
"""A planner: draws one draft, or several, the best first; the first that devices hold is the plan."""


def whole_device_widths(options: Sequence[DeploymentOption]) -> Widths:
    """Returns, for each degree, the option that holds most of its devices, by rising degree."""
    widest: dict[int, DeploymentOption] = {}
    for option in options:
        if option.degree not in widest or option.quota > widest[option.degree].quota:
            widest[option.degree] = option
    return tuple(widest[degree] for degree in sorted(widest))


def levels(names: Iterable[Node], predecessors: Callable[[Node], Iterable[Node]]) -> list[list[Node]]:
    """Groups nodes by the longest path that leads to them, so that no level holds a node and one it depends on.

    Spindle's section 3.1 says breadth-first depth, which puts C beside B for A -> B -> C with A -> C.

    Args:
        names: In topological order.
        predecessors: What a node waits for.
    """
    depth: dict[Node, int] = {}
    found: list[list[Node]] = []
    for name in names:
        depth[name] = max((depth[other] + 1 for other in predecessors(name)), default=0)
        if depth[name] == len(found):
            found.append([])
        found[depth[name]].append(name)
    return found


def whole_job(name: str, option: DeploymentOption) -> Job:
    """Returns a job that runs one module unsliced."""
    return Job(parts=(Part(module=name),), options=(option,))


def in_task_order(sheet: Sheet) -> list[str]:
    """Returns the modules, those of one task after those of another, producers first within each."""
    order = sheet.graph.topological_order()
    tasks = sheet.settings.tasks or (order,)
    return [name for task in tasks for name in order if name in task]
