"""Plans: the stages of a model's parts, and for each part its ranks and its slots.

A placement in a file needs at least ``{"part": {"module": "text"}, "slots": [0, 1]}``: the whole module, on rank 0.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from mosaic.artifact import Ge, fingerprint, save
from mosaic.device import Device, StrictFile
from mosaic.errors import InvalidPlanError
from mosaic.graph import ModuleGraph, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(StrictFile):
    """The ranks of a placement."""

    ranks: tuple[int, ...] = (0,)
    """They share the batch; rank i is on device i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(StrictFile):
    """One part's place: its ranks, its slots on each of their devices, and the times predicted there."""

    part: Part
    """The module or its layers."""
    slots: tuple[int, ...]
    """Slot indices, rising; their number is the quota. Those of its first device, if devices differ."""
    grid: Grid = Grid()
    slots_by_device: tuple[tuple[int, ...], ...] = ()
    """Slot indices on each of ``devices`` if these differ; empty if all have ``slots``."""
    forward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted forward time beside its stage's other modules, in milliseconds."""
    backward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted backward time beside its stage's other modules, in milliseconds."""
    route_forward_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``forward_ms`` in which rows travel between ranks."""
    route_backward_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``backward_ms`` in which their gradients do."""
    reduce_ms: Annotated[float, Ge(0)] = 0.0
    """The part of ``backward_ms`` in which its parameters' gradients are summed and nothing else is done."""

    @property
    def module(self) -> str:
        """Name of its module in the graph."""
        return self.part.module

    @property
    def devices(self) -> tuple[int, ...]:
        """Device indices, one for each of its ranks."""
        return self.grid.ranks

    @property
    def quota(self) -> int:
        """Number of slots on each device."""
        return len(self.slots)

    @property
    def degree(self) -> int:
        """Data-parallel degree."""
        return len(self.grid.ranks)

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Each device and slot that it holds."""
        return tuple((device, slot) for device in self.devices for slot in self.slots_on(device))

    def slots_on(self, device: int) -> tuple[int, ...]:
        """Returns its slots on one of its devices; raises ValueError for another."""
        place = self.devices.index(device)
        return self.slots_by_device[place] if self.slots_by_device else self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(StrictFile):
    """Parts meant to run at the same time, on disjoint partitions wherever they share a device."""

    placements: tuple[Placement, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules in this stage."""
        return tuple(placement.module for placement in self.placements)

    @property
    def forward_ms(self) -> float:
        """Predicted time of its slowest forward, in milliseconds."""
        return max((p.forward_ms for p in self.placements), default=0.0)

    @property
    def backward_ms(self) -> float:
        """Predicted time of its slowest backward, in milliseconds."""
        return max((p.backward_ms for p in self.placements), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord(StrictFile):
    """The search that produced a plan."""

    method: str
    """Name of the solver, such as ``gahc``, ``sequential`` or ``manual``."""
    seconds: Annotated[float, Ge(0)] = 0.0
    """Wall time of the search."""
    num_evaluations: Annotated[int, Ge(0)] = 0
    """Stages whose best allocation was searched."""
    num_cache_hits: Annotated[int, Ge(0)] = 0
    """Stages whose best allocation was already known."""
    num_pruned: Annotated[int, Ge(0)] = 0
    """Merges dropped before their stage was evaluated."""
    num_sat_calls: Annotated[int, Ge(0)] = 0
    """Feasibility questions put to CP-SAT."""
    status: Literal["optimal", "feasible"] = "feasible"
    """``optimal`` if the search proved that no plan is predicted faster."""
    bound_ms: Annotated[float, Ge(0)] = 0.0
    """No plan is predicted to take less, in milliseconds; 0 where the search gives no bound."""
    simulated_ms: Annotated[float, Ge(0)] = 0.0
    """Step for which it was chosen among several plans, simulated with modules that share the network between devices,
    in milliseconds; nothing is proven of it. 0 where it was not chosen so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(StrictFile):
    """Stages in order, with every module of a graph, or its parts one after the other, in exactly one of them.

    Raises:
        InvalidPlanError: A module is placed twice, in part only, or not on a slot of the device, or two parts of one
            stage share a slot of one device.
    """

    SCHEMA_VERSION: ClassVar[int] = 3

    schema_version: int = 3
    device: Device
    """One of the devices; all are alike."""
    num_devices: Annotated[int, Ge(1)] = 1
    stages: tuple[Stage, ...]
    """In the order of their forward pass."""
    graph: str
    """Fingerprint of the module graph that it was made for."""
    profile: str | None = None
    """Fingerprint of the profile that it was made from; None for a plan made by hand."""
    sequential_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted time of the best plan that runs one module at a time, in milliseconds."""
    search: SearchRecord
    """The search that found it."""
    foreign_cpu_share: Annotated[float, Ge(0)] = 0.0
    """Share of the cores' time that other processes took while the modules were measured, as in the profile."""
    communication_slots: Annotated[int, Ge(0)] = 0
    """The last slots of each device that no module has, left to communication."""
    communication_sms: Annotated[int, Ge(0)] = 0
    """SMs that a collective is held to: of those slots and of the device's remainder; 0: it takes what it likes."""

    def __post_init__(self) -> None:
        parts: dict[str, list[tuple[int, Part]]] = {}
        for index, stage in enumerate(self.stages):
            taken: list[set[int]] = [set() for _ in range(self.num_devices)]
            for placement in stage.placements:
                parts.setdefault(placement.part.module, []).append((index, placement.part))
                self._check_placement(placement)
                slots_of = placement.slots_by_device or (placement.slots,) * len(placement.devices)
                for device, slots in zip(placement.devices, slots_of, strict=True):
                    if not taken[device].isdisjoint(slots):
                        raise _shared(stage, placement, device, min(taken[device].intersection(slots)))
                    taken[device].update(slots)
        for module_parts in parts.values():
            if len(module_parts) > 1 or not module_parts[0][1].is_whole:
                _check_parts(module_parts)

    def _check_placement(self, placement: Placement) -> None:
        of = f"module {placement.module!r}"
        self.device.check_quota(placement.quota, of=of)
        for slots in (placement.slots, *placement.slots_by_device):
            if not all(map(operator.lt, slots, slots[1:])) or len(slots) != placement.quota:
                raise InvalidPlanError(
                    f"{of} has slots {slots}; list each slot once, rising, and as many on every device"
                )
            if slots[-1] >= self.device.num_slots - self.communication_slots and slots[-1] < self.device.num_slots:
                raise InvalidPlanError(
                    f"{of} has slots {slots}; the last {self.communication_slots} of {self.device.num_slots} are "
                    "reserved for communication: use lower ones"
                )
            if slots[0] < 0 or slots[-1] >= self.device.num_slots:
                raise InvalidPlanError(
                    f"{of} has slots {slots}; {self.device.name} has slots 0 to {self.device.num_slots - 1}"
                )
        by_device = placement.slots_by_device
        if by_device and (len(by_device) != len(placement.devices) or by_device[0] != placement.slots):
            raise InvalidPlanError(
                f"{of} has slots_by_device {by_device} on devices {placement.devices}; give one entry for each device, "
                "the first of them equal to slots"
            )
        if not placement.devices or len(set(placement.devices)) != len(placement.devices):
            raise InvalidPlanError(f"{of} has devices {placement.devices}; name each device once, at least one")
        if not all(0 <= device < self.num_devices for device in placement.devices):
            raise InvalidPlanError(
                f"{of} has devices {placement.devices}; this plan has devices 0 to {self.num_devices - 1}"
            )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """All placements, stage after stage."""
        return tuple(placement for stage in self.stages for placement in stage.placements)

    @property
    def predicted_ms(self) -> float:
        """Predicted time of all stages, forward and backward each with its own maximum, in milliseconds."""
        return sum(stage.forward_ms + stage.backward_ms for stage in self.stages)

    @property
    def communication_ms(self) -> float:
        """Predicted communication of all modules that nothing hides, one after the other, in milliseconds."""
        return sum(p.route_forward_ms + p.route_backward_ms + p.reduce_ms for p in self.placements)

    @property
    def predicted_speedup(self) -> float:
        """Predicted time of the sequential plan over that of this one; 1 where nothing was predicted."""
        return self.sequential_ms / self.predicted_ms if self.predicted_ms > 0 else 1.0

    @property
    def utilisation(self) -> float:
        """Modelled share of all devices' slot time in use, from predicted times; no counter measures it."""
        used = sum(len(p.cells) * (p.forward_ms + p.backward_ms) for p in self.placements)
        whole = self.predicted_ms * self.device.num_slots * self.num_devices
        return used / whole if whole else 0.0

    @property
    def sliced(self) -> tuple[str, ...]:
        """Modules that are placed in several parts, sorted."""
        return tuple(sorted({placement.module for placement in self.placements if not placement.part.is_whole}))

    @property
    def is_colocated(self) -> bool:
        """True if any stage has more than one module."""
        return any(len(stage.placements) > 1 for stage in self.stages)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name this plan."""
        return fingerprint(self)

    def save(self, path: str | Path) -> None:
        """Writes this plan to a JSON file, whole or not at all; ``mosaic.load`` reads it.

        Raises:
            MosaicError: The folder cannot be written, or the disk is full.
        """
        save(self, Path(path))

    def placement(self, module: str) -> Placement:
        """Returns where a module, or the first of its parts, is placed; raises KeyError if it is not in this plan."""
        for placement in self.placements:
            if placement.module == module:
                return placement
        raise KeyError(module)

    def is_alone(self, module: str, *, num_slots: int) -> bool:
        """Returns True if a module has a stage and all ``num_slots`` slots of a device to itself."""
        return any(
            len(stage.placements) == 1
            and stage.placements[0].module == module
            and stage.placements[0].quota == num_slots
            for stage in self.stages
        )

    def check_matches(self, *, graph: ModuleGraph, device: Device) -> None:
        """Raises InvalidPlanError unless this plan can run ``graph`` on ``device``, in whole modules."""
        if self.device.kind != device.kind or self.device.num_slots > device.num_slots:
            raise InvalidPlanError(
                f"the plan is for {self.device.name} with {self.device.num_slots} slots; this device is "
                f"{device.name} with {device.num_slots}; plan again for this device"
            )
        if self.graph != graph.fingerprint:
            raise InvalidPlanError(
                f"the plan was made for graph {self.graph}, but this model is graph {graph.fingerprint} "
                f"({', '.join(graph.names)}); plan again for this model and these input shapes"
            )
        self.check_covers(graph)
        if self.sliced:
            raise InvalidPlanError(
                f"the plan of {self.search.method} cuts {', '.join(self.sliced)} into parts, and whole modules are "
                "run; plan without slices, or place layers as modules"
            )

    def check_covers(self, graph: ModuleGraph) -> None:
        """Raises InvalidPlanError unless each module is placed once, after everything that it depends on.

        Paper section 3.1, formulas 2 and 3.
        """
        stage_of: dict[str, int] = {}  # of the last part
        first_of: dict[str, int] = {}
        for index, stage in enumerate(self.stages):
            for placement in stage.placements:
                first_of.setdefault(placement.part.module, index)
                stage_of[placement.part.module] = index
        names = dict.fromkeys(graph.names)
        missing = [name for name in names if name not in stage_of]
        unknown = [name for name in stage_of if name not in names]
        problems = [f"leaves out {missing}"] * bool(missing)
        problems += [f"places {unknown}, which the graph lacks: mosaic doctor --model names the reason"] * bool(unknown)
        if problems:
            raise InvalidPlanError(f"the plan {' and '.join(problems)}")
        for edge in graph.edges:
            if stage_of[edge.source] >= first_of[edge.target]:
                raise InvalidPlanError(
                    f"{edge.target!r} (stage {first_of[edge.target]}) depends on {edge.source!r} "
                    f"(stage {stage_of[edge.source]}); put it in a later stage"
                )


def _check_parts(parts: Sequence[tuple[int, Part]]) -> None:
    """Raises InvalidPlanError unless a module's parts, each with its stage, follow each other and make it whole."""
    done, before, total = 0, -1, parts[0][1].total
    for index, part in parts:
        if part.is_whole:
            raise InvalidPlanError(f"module {part.module!r} is placed twice; place it once")
        if part.first != done or part.total != total:
            raise InvalidPlanError(
                f"{part.module!r} goes on at layer {part.first} of {part.total} after {done} of {total}; place each "
                "layer once, in order"
            )
        if index == before:
            raise InvalidPlanError(f"two parts of {part.module!r} are in stage {index}; put one into a later stage")
        done, before = part.end, index
    if done != total:
        raise InvalidPlanError(f"{parts[0][1].module!r} is placed up to layer {done} of {total}; place all layers")


def _shared(stage: Stage, later: Placement, device: int, slot: int) -> InvalidPlanError:
    first = next(p for p in stage.placements if device in p.devices and slot in p.slots_on(device))
    return InvalidPlanError(
        f"{first.module!r} and {later.module!r} of one stage both hold slot {slot} of device {device}; "
        "partitions of a stage are disjoint: move one of them"
    )


def plan_from_quotas(stages: Sequence[Mapping[str, int]], *, graph: ModuleGraph, device: Device) -> Plan:
    """Makes a plan by hand for one device: for each stage, a quota in slots for each module.

    Slots are given out from 0 upwards within a stage, in the order of the mapping.

    Raises:
        InvalidPlanError: A quota is below one slot, a stage asks for more slots than the device has, a
            module is missing, unknown, placed twice, or placed before something that it depends on.
    """
    built = []
    for quotas in stages:
        for name, quota in quotas.items():
            device.check_quota(quota, of=f"module {name!r}")
        if sum(quotas.values()) > device.num_slots:
            raise InvalidPlanError(
                f"stage {dict(quotas)} asks for {sum(quotas.values())} slots; {device.name} has {device.num_slots}"
            )
        first = 0
        placements = []
        for name, quota in quotas.items():
            placements.append(Placement(part=Part(module=name), slots=tuple(range(first, first + quota))))
            first += quota
        built.append(Stage(placements=tuple(placements)))
    plan = Plan(device=device, stages=tuple(built), graph=graph.fingerprint, search=SearchRecord(method="manual"))
    plan.check_covers(graph)
    return plan
