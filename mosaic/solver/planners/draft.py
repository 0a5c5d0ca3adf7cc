"""Drafts of comparison planners: whole-device options, levels, and waves of jobs without devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mosaic.graph import ModuleGraph, Part
from mosaic.solver.options import DeploymentOption

Widths = tuple[DeploymentOption, ...]
"""Ways to deploy one module on whole devices, by rising degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """What the comparison planners need to know beyond the cost model."""

    num_layers: Mapping[str, int] = field(default_factory=dict)
    """Equal consecutive layers of modules, where known; Spindle slices between them."""
    default_layers: int = 1
    """Layers of every other module, which a graph does not record; 1 keeps modules whole, so that the plan can run."""
    slice_overhead_ms: float = 0.0
    """What a slice takes, in forward and again in backward, above its share of the module's time; a whole module's
    time holds its own launches already."""
    interpolation: Literal["speedup", "time"] = "speedup"
    """Between two degrees: Spindle's released code (speed-up), or the appendix's Eq. 11 (time)."""
    extend: bool = True
    """Whether Spindle's waves give idle devices to the runs they hold."""
    island_size: int = 8
    """Devices with fast links between them (a node); placement keeps a module inside one where it can."""
    max_partitioned: int = 10
    """Modules of a level up to which ``distmm-waves`` tries every way to make waves of them."""

    def __post_init__(self) -> None:
        counts = (self.default_layers, self.island_size, *self.num_layers.values())
        if min(counts) < 1 or not 0 <= self.slice_overhead_ms < float("inf") or self.max_partitioned < 0:
            raise ValueError(
                f"{self}: layers and island_size are at least 1, slice_overhead_ms is finite and not negative"
            )
        if self.interpolation not in ("speedup", "time"):
            raise ValueError(f"interpolation={self.interpolation!r} is unknown; use 'speedup' or 'time'")

    def layers(self, module: str) -> int:
        """Returns of how many equal layers a module consists."""
        return self.num_layers.get(module, self.default_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts that will run in turn on whole devices, not yet on particular ones."""

    parts: tuple[Part, ...]
    """In the order of their forward pass; more than one only where a chain of modules was contracted."""
    option: DeploymentOption
    """How each of their modules is deployed."""

    @property
    def names(self) -> tuple[str, ...]:
        """Modules that it runs parts of."""
        return tuple(part.module for part in self.parts)


DraftWave = tuple[Job, ...]
"""Jobs that run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """What a planner draws waves for."""

    graph: ModuleGraph
    """What feeds what."""
    widths: Mapping[str, Widths]
    """For each module its options."""
    num_devices: int
    """Devices."""
    settings: PlannerSettings
    """Granularity of slices, and variants."""


Draw = Callable[[Sheet], list[DraftWave]]
"""A planner."""

Balance = Callable[[Sequence[str]], DraftWave]
"""Gives modules, whose least degrees fit side by side, disjoint whole devices."""


def whole_device_widths(options: Sequence[DeploymentOption]) -> Widths:
    """Returns, for each degree, the option that holds most of its devices, by rising degree."""
    widest: dict[int, DeploymentOption] = {}
    for option in options:
        if option.degree not in widest or option.quota > widest[option.degree].quota:
            widest[option.degree] = option
    return tuple(widest[degree] for degree in sorted(widest))


def falling(widths: Widths) -> Widths:
    """Drops every degree that is no faster than a lower one.

    Spindle's theorem needs times that fall (section 3.3); how the paper gets there is not said, dropping is ours.
    """
    kept: list[DeploymentOption] = []
    for option in widths:
        if not kept or option.latency_ns < kept[-1].latency_ns:
            kept.append(option)
    return tuple(kept)


def levels(names: Iterable[str], predecessors: Callable[[str], Sequence[str]]) -> list[list[str]]:
    """Groups nodes by the longest path that leads to them, so that no level holds a node and one it depends on.

    Spindle's section 3.1 says breadth-first depth, which puts C beside B for A -> B -> C with A -> C.

    Args:
        names: In topological order.
        predecessors: What a node waits for.
    """
    depth: dict[str, int] = {}
    found: list[list[str]] = []
    for name in names:
        depth[name] = max((depth[other] + 1 for other in predecessors(name)), default=0)
        if depth[name] == len(found):
            found.append([])
        found[depth[name]].append(name)
    return found


def whole_job(name: str, option: DeploymentOption) -> Job:
    """Returns a job that runs one module unsliced."""
    return Job(parts=(Part(module=name),), option=option)


def draw_levels(graph: ModuleGraph, waves_of: Callable[[Sequence[str]], list[DraftWave]]) -> list[DraftWave]:
    """Draws the waves of each level in turn."""
    return [wave for level in levels(graph.topological_order(), graph.predecessors) for wave in waves_of(level)]


def wave_ns(wave: DraftWave) -> int:
    """Returns the slowest forward plus the slowest backward of a wave of whole modules, in nanoseconds."""
    return max(job.option.forward_ns for job in wave) + max(job.option.backward_ns for job in wave)
