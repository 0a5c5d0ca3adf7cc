"""A planning problem as data: machine, modules with their option tables, interference between pairs.

``docs/planning.md`` describes the file. ``TableCost`` is its cost model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from mosaic.artifact import Ge, Le, StrictFile
from mosaic.cost.interference import Interference
from mosaic.cost.protocol import Cost
from mosaic.device import Device
from mosaic.graph import Edge, ModuleGraph, ModuleNode
from mosaic.profile import Phase

MAX_DEVICES = 4096
"""Maximum number of devices, at which a search takes seconds."""
MAX_SLOTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOption(StrictFile):
    """One way to deploy a module: on ``degree`` devices, ``quota`` slots of each."""

    degree: Annotated[int, Ge(1)]
    quota: Annotated[int, Ge(1)]
    forward_ms: float
    """Forward time alone, in milliseconds."""
    backward_ms: float
    """Backward time alone, in milliseconds."""
    memory_bytes: Annotated[int, Ge(0)] = 0
    """Memory on each of its devices while its stage runs, in bytes; the same for all quotas of a degree."""
    resident_bytes: Annotated[int, Ge(0)] = 0
    """The part of ``memory_bytes`` for parameters, gradients and optimizer state."""
    activation_bytes: Annotated[int, Ge(0)] = 0
    """The part of ``memory_bytes`` held from forward to backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModule(StrictFile):
    """A module that is placed as a whole."""

    name: str
    """Unique in the instance."""
    options: tuple[InstanceOption, ...]
    """Ways to deploy it; at most one for each degree and quota."""
    after: tuple[str, ...] = ()
    """Modules that must be in an earlier stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance(StrictFile):
    """The slowdown by one neighbour on a device; several add up."""

    module: str
    """The module that is slowed down."""
    beside: str
    """The neighbour."""
    forward: Annotated[float, Ge(0)] = 0.0
    """Added share of the module's forward time alone if the neighbour holds all slots of the device; proportional to
    its quota."""
    backward: Annotated[float, Ge(0)] = 0.0
    """The same for backward."""


@dataclass(frozen=True, kw_only=True)
class Instance(StrictFile):
    """A machine of equal devices, and the modules to plan.

    Raises:
        ValueError: A table is empty or inconsistent, a name or a pair is repeated or unknown, or dependencies form a
            cycle.
    """

    schema_version: int = 1
    name: str
    source: str = ""
    """Source of the numbers: ``simulated`` or ``measured``, and the method."""
    num_devices: Annotated[int, Ge(1), Le(MAX_DEVICES)]
    num_slots: Annotated[int, Ge(1), Le(MAX_SLOTS)]
    """Slots of each device."""
    memory_bytes: Annotated[int, Ge(0)] = 0
    """Memory of each device in bytes; 0: unlimited."""
    modules: tuple[InstanceModule, ...]
    disturbances: tuple[Disturbance, ...] = ()
    """Slowdowns of pairs; 0 for unlisted pairs."""

    def __post_init__(self) -> None:
        _ = self.graph  # raises for no modules, repeated or unknown names, and cycles
        for module in self.modules:
            _check_options(module)
        names = {module.name for module in self.modules}
        pairs = Counter((entry.module, entry.beside) for entry in self.disturbances)
        for entry in self.disturbances:
            pair = (entry.module, entry.beside)
            if not set(pair) <= names or entry.module == entry.beside or pairs[pair] > 1:
                raise ValueError(f"the disturbance of {pair[0]!r} by {pair[1]!r}: list two different modules once")

    @property
    def device(self) -> Device:
        """One of its devices."""
        return Device(name="instance", kind="cuda", num_slots=self.num_slots, memory_bytes=self.memory_bytes)

    @cached_property
    def graph(self) -> ModuleGraph:
        """Pairs of modules: the first must come before the second."""
        return ModuleGraph(
            modules=tuple(ModuleNode(name=module.name) for module in self.modules),
            edges=tuple(Edge(source=other, target=module.name) for module in self.modules for other in module.after),
        )


def _check_options(module: InstanceModule) -> None:
    of = f"module {module.name!r}"
    if not module.options:
        raise ValueError(f"{of} has no options; list at least one degree and quota with its times")
    memory: dict[int, tuple[int, int, int]] = {}
    for option in module.options:
        own = (option.memory_bytes, option.resident_bytes, option.activation_bytes)
        if own[1] + own[2] > own[0]:
            raise ValueError(
                f"{of} has resident_bytes={own[1]} and activation_bytes={own[2]}, memory_bytes={own[0]} at degree "
                f"{option.degree}; memory_bytes includes both: set it to at least their sum"
            )
        if memory.setdefault(option.degree, own) != own:
            raise ValueError(
                f"{of} needs (memory, resident, activation) {memory[option.degree]} and {own} bytes on {option.degree} "
                "devices; memory depends on the degree, not on the quota: use one number"
            )
    shapes = Counter((option.degree, option.quota) for option in module.options)
    repeated = [shape for shape, count in shapes.items() if count > 1]
    if repeated:
        raise ValueError(f"{of} lists (degree, quota)={repeated[0]} twice; list each option once")


class TableInterference(Interference):
    """The sum of an instance's disturbances, each proportional to its neighbour's quota."""

    def __init__(self, instance: Instance) -> None:
        self._num_slots = instance.num_slots
        self._shares = {
            (entry.module, entry.beside, phase): share
            for entry in instance.disturbances
            for phase, share in ((Phase.FORWARD, entry.forward), (Phase.BACKWARD, entry.backward))
        }
        self.is_zero = not any(self._shares.values())

    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        return self._shares.get((module, beside, phase), 0.0) * beside_quota / self._num_slots


class TableCost(Cost):
    """Times and memory from the tables of an instance."""

    def __init__(self, instance: Instance) -> None:
        self.profile_fingerprint = instance.fingerprint
        self.interference = TableInterference(instance)
        self._tables: dict[str, dict[int, dict[int, InstanceOption]]] = {}
        for module in instance.modules:
            table = self._tables.setdefault(module.name, {})
            for option in module.options:
                table.setdefault(option.degree, {})[option.quota] = option

    def degrees(self, module: str) -> tuple[int, ...]:
        return tuple(sorted(self._tables[module]))

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        return tuple(sorted(self._tables[module][degree]))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        option = self._tables[module][degree][quota]
        return option.forward_ms if phase is Phase.FORWARD else option.backward_ms

    def memory_bytes(self, module: str, degree: int) -> int:
        return next(iter(self._tables[module][degree].values())).memory_bytes

    def kept_bytes(self, module: str, degree: int) -> int:
        option = next(iter(self._tables[module][degree].values()))
        return option.resident_bytes + option.activation_bytes
