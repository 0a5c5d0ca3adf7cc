"""Plans: the stages of a model's parts, with the ranks and slots of each part.

The minimal placement in a file is ``{"part": {"module": "text"}, "slots": [0, 1]}``: the whole module, on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from mosaic import artifact
from mosaic.artifact import Ge, StrictFile
from mosaic.device import Device
from mosaic.errors import InvalidPlanError
from mosaic.graph import ModuleGraph, Part
from mosaic.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(StrictFile):
    """The ranks that share the batch; rank i is on device i."""

    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(StrictFile):
    """A part's ranks, slots on each of their devices, and predicted times."""

    part: Part
    slots: tuple[int, ...]
    """Increasing slot indices on its first device; their number is the quota."""
    grid: Grid = Grid()
    slots_by_device: tuple[tuple[int, ...], ...] = ()
    """Slot indices on each of ``devices`` if these differ; empty if all have ``slots``."""
    forward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted beside the other modules of its stage, like ``backward_ms``."""
    backward_ms: Annotated[float, Ge(0)] = 0.0
    route_forward_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``forward_ms`` for sending rows between ranks; in backward, their gradients."""
    route_backward_ms: Annotated[float, Ge(0)] = 0.0
    reduce_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``backward_ms`` for gradient reduction that is not overlapped."""

    @property
    def module(self) -> str:
        return self.part.module

    @property
    def devices(self) -> tuple[int, ...]:
        return self.grid.ranks

    @property
    def quota(self) -> int:
        return len(self.slots)

    @property
    def degree(self) -> int:
        return len(self.devices)

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        return tuple((device, slot) for device in self.devices for slot in self.slots_on(device))

    def slots_on(self, device: int) -> tuple[int, ...]:
        place = self.devices.index(device)
        return self.slots_by_device[place] if self.slots_by_device else self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporalStage(StrictFile):
    """Parts planned to run at the same time, on disjoint partitions of shared devices."""

    placements: tuple[Placement, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(placement.module for placement in self.placements)

    @property
    def forward_ms(self) -> float:
        return max((p.forward_ms for p in self.placements), default=0.0)

    @property
    def backward_ms(self) -> float:
        return max((p.backward_ms for p in self.placements), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord(StrictFile):
    """The search that produced a plan."""

    method: str
    """Name of the solver, such as ``gahc``, ``sequential`` or ``manual``."""
    seconds: Annotated[float, Ge(0)] = 0.0
    status: Literal["optimal", "feasible"] = "feasible"
    """``optimal`` if no plan is predicted faster, which is proven."""
    bound_ms: Annotated[float, Ge(0)] = 0.0
    """Lower bound of predicted times; 0 without one."""
    simulated_ms: Annotated[float, Ge(0)] = 0.0
    """Simulated step over a shared network, if the plan was chosen by it; otherwise 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(StrictFile):
    """Stages in order, with every module of a graph in exactly one stage, or its parts in successive ones."""

    schema_version: int = 4
    device: Device
    """One of the equal devices."""
    num_devices: Annotated[int, Ge(1)] = 1
    stages: tuple[TemporalStage, ...]
    graph: str
    """Fingerprint of its module graph."""
    profile: str | None = None
    """Fingerprint of its profile; None for a plan made by hand."""
    sequential_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted time of the best plan with one module at a time."""
    search: SearchRecord
    foreign_cpu_share: Annotated[float, Ge(0)] = 0.0
    """Share of the CPU time used by other processes during profiling."""

    def __post_init__(self) -> None:
        parts: dict[str, list[tuple[int, Part]]] = {}
        for index, stage in enumerate(self.stages):
            owner: dict[tuple[int, int], str] = {}
            for placement in stage.placements:
                parts.setdefault(placement.module, []).append((index, placement.part))
                self._check_placement(placement)
                for device, slot in placement.cells:
                    if (other := owner.setdefault((device, slot), placement.module)) != placement.module:
                        raise InvalidPlanError(
                            f"{other!r} and {placement.module!r} of one stage both hold slot {slot} of device "
                            f"{device}; use disjoint partitions within a stage"
                        )
        for module, module_parts in parts.items():
            ends = [0, *accumulate(part.count for _, part in module_parts)]
            is_whole = [(part.first, part.total) for _, part in module_parts] == [(end, ends[-1]) for end in ends[:-1]]
            if not is_whole or len(dict(module_parts)) < len(module_parts):
                places = ", ".join(f"as {part} in stage {index}" for index, part in module_parts)
                rule = "place each layer once, in order, and one part a stage"
                raise InvalidPlanError(f"{module!r} is placed {places}; {rule}")

    def _check_placement(self, placement: Placement) -> None:
        of, devices, by_device = f"module {placement.module!r}", placement.devices, placement.slots_by_device
        self.device.check_quota(placement.quota, of=of)
        if not devices or len(set(devices)) != len(devices) or not set(devices) <= set(range(self.num_devices)):
            raise InvalidPlanError(f"{of} has devices {devices}; name one or more of 0 to {self.num_devices - 1}, once")
        if by_device and (len(by_device) != len(devices) or by_device[0] != placement.slots):
            raise InvalidPlanError(f"{of} has slots_by_device {by_device}; begin with ``slots``, one for each device")
        for slots in (placement.slots, *by_device):
            is_rising = list(slots) == sorted(set(slots) & set(self.device.slots))
            if not is_rising or len(slots) != placement.quota:
                rule = f"list slots 0 to {self.device.num_slots - 1} once, rising, and as many on every device"
                raise InvalidPlanError(f"{of} has slots {slots} of {self.device.name}; {rule}")

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(placement for stage in self.stages for placement in stage.placements)

    @property
    def predicted_ms(self) -> float:
        """Predicted time of all stages, each with its slowest forward plus its slowest backward."""
        return sum(stage.forward_ms + stage.backward_ms for stage in self.stages)

    @property
    def predicted_speedup(self) -> float:
        """Predicted time of the sequential plan over this plan's; 1 without predictions."""
        return self.sequential_ms / self.predicted_ms if self.predicted_ms > 0 else 1.0

    @property
    def utilisation(self) -> float:
        """Share of slot time in use, from predicted times."""
        busy_ms = sum(len(p.cells) * (p.forward_ms + p.backward_ms) for p in self.placements)
        total_ms = self.predicted_ms * self.device.num_slots * self.num_devices
        return busy_ms / total_ms if total_ms else 0.0

    @property
    def sliced(self) -> tuple[str, ...]:
        return tuple(sorted({each.module for each in self.placements if each.part.count < each.part.total}))

    @property
    def is_colocated(self) -> bool:
        return any(len(stage.placements) > 1 for stage in self.stages)

    save = artifact.save  # read by ``mosaic.load``

    def placement(self, module: str) -> Placement:
        """Returns the placement of a module or of its first part; raises KeyError without one."""
        return {placement.module: placement for placement in reversed(self.placements)}[module]

    def is_alone(self, module: str) -> bool:
        """Returns True if a module is alone in its stage, with all slots of its devices."""
        alone = (stage.placements[0] for stage in self.stages if len(stage.placements) == 1)
        return any(placed.module == module and placed.quota == self.device.num_slots for placed in alone)

    def check_matches(self, *, graph: ModuleGraph, device: Device) -> None:
        """Raises InvalidPlanError unless this plan can run ``graph`` on ``device``, in whole modules."""
        if self.device.kind != device.kind or self.device.num_slots > device.num_slots:
            raise InvalidPlanError(f"the plan is for {self.device}, not for {device}; plan again for this device")
        if self.graph != graph.fingerprint:
            raise InvalidPlanError(f"the plan is for graph {self.graph}, not for {graph}; plan this model again")
        self.check_covers(graph)
        if self.sliced:
            raise InvalidPlanError(f"the plan cuts {', '.join(self.sliced)} into parts; place layers as modules")

    def check_covers(self, graph: ModuleGraph) -> None:
        """Raises InvalidPlanError unless each module is placed after its predecessors (paper 3.1, formulas 2, 3)."""
        numbered = list(enumerate(self.stages))
        first = {name: index for index, stage in reversed(numbered) for name in stage.names}
        last = {name: index for index, stage in numbered for name in stage.names}
        missing = [name for name in graph.names if name not in last]
        unknown = [name for name in last if name not in graph.names]
        if missing or unknown:
            raise InvalidPlanError(
                f"the plan leaves out {missing or 'nothing'} and places {unknown or 'nothing'} that the graph lacks; "
                "mosaic doctor --model names the reason"
            )
        for edge in graph.edges:
            source, target = last[edge.source], first[edge.target]
            if source >= target:
                raise InvalidPlanError(
                    f"{edge.target!r} (stage {target}) depends on {edge.source!r} (stage {source}); place it later"
                )


def load(path: str | Path) -> Plan | Profile:
    """Reads the file of ``plan.save(path)``, ``profile.save(path)``, ``mosaic plan`` or ``mosaic profile``.

    Raises:
        InvalidFileError: The file is missing, damaged, or neither a plan nor a profile.
    """
    is_profile = "samples" in artifact.load(dict[str, Any], Path(path))
    return artifact.load(Profile, Path(path)) if is_profile else artifact.load(Plan, Path(path))


def plan_from_quotas(stages: Sequence[Mapping[str, int]], *, graph: ModuleGraph, device: Device) -> Plan:
    """Creates a plan for one device from the quota of each module in each stage, from slot 0 upwards.

    Raises:
        InvalidPlanError: A quota is below one slot, a stage asks for more slots than the device has, a module is
            missing, unknown, placed twice, or placed before something that it depends on.
    """
    built = []
    for quotas in stages:
        device.check_quota(sum(quotas.values()), of=f"stage {dict(quotas)}")
        ends = accumulate(quotas.values())
        placements = (
            Placement(part=Part(module=name), slots=tuple(range(end - quota, end)))
            for (name, quota), end in zip(quotas.items(), ends, strict=True)
        )
        built.append(TemporalStage(placements=tuple(placements)))
    plan = Plan(device=device, stages=tuple(built), graph=graph.fingerprint, search=SearchRecord(method="manual"))
    plan.check_covers(graph)
    return plan
