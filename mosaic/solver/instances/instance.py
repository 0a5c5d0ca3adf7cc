"""A planning problem as plain data in one JSON file: machine, modules with their option tables, what disturbs what.

It needs no profile and no model, so that anybody can feed the solver; ``README.md`` beside this file has the format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mosaic.device import FORBID_EXTRA, Device
from mosaic.graph import Edge, ModuleGraph, ModuleNode
from mosaic.solver.options import MAX_MS

MAX_DEVICES = 4096
"""Devices of an instance; the searches walk through them one by one."""
MAX_SLOTS = 1024
"""Slots of a device: more than any GPU has SMs."""
MAX_BYTES = 2**53
"""Bytes of a device or module: 9 PB. All modules' bytes are added up in 64 bits."""
MAX_OPTIONS = 200_000
"""Of all modules together: minutes of search, and some hundred megabytes to read."""
MAX_DISTURBED = 30_000_000
"""Options times modules times slots, where modules disturb each other: a search holds 32 bytes for each."""
MAX_SHARE = 1000.0
"""What one neighbour may cost, as a share of the time alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOption:
    """One way to deploy a module: on ``degree`` devices, ``quota`` slots of each."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    degree: int
    """Devices."""
    quota: int
    """Slots on each of them."""
    forward_ms: float
    """Forward time alone, in milliseconds."""
    backward_ms: float
    """Backward time alone, in milliseconds."""
    memory_bytes: int = 0
    """Memory on each of its devices while its stage runs, in bytes; the same for all quotas of a degree."""
    resident_bytes: int = 0
    """The part of ``memory_bytes`` that stays all the time: parameters, gradients, optimizer state."""
    activation_bytes: int = 0
    """The part of it that is kept from forward to backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Which options of a module are allowed; both lists must be obeyed."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    degrees: tuple[int, ...] = ()
    """Allowed numbers of devices; empty: all."""
    quotas: tuple[int, ...] = ()
    """Allowed quotas in slots; empty: all."""

    def allows(self, option: InstanceOption) -> bool:
        """Whether a module with this pin may use an option."""
        return (not self.degrees or option.degree in self.degrees) and (not self.quotas or option.quota in self.quotas)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModule:
    """A module that is placed as a whole."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    """Its name, unlike any other."""
    options: tuple[InstanceOption, ...]
    """Ways to deploy it; at most one for each degree and quota."""
    after: tuple[str, ...] = ()
    """Modules that must be in an earlier stage."""
    pin: Pin = Pin()
    """Which of the options are allowed."""

    @property
    def allowed(self) -> tuple[InstanceOption, ...]:
        """The options that the pin leaves."""
        return tuple(option for option in self.options if self.pin.allows(option))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What one neighbour on a device costs a module; what several cost adds up."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """The module that is slowed down."""
    beside: str
    """The neighbour."""
    forward: float = 0.0
    """Share of the module's forward time alone that is added where the neighbour held all slots of the device; in
    proportion to its quota where it holds fewer."""
    backward: float = 0.0
    """The same for backward."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine of equal devices, and the modules to plan.

    Raises:
        ValueError: No device, no slot, no module, a name that is empty, used twice, unknown or has control characters,
            an option table that is empty, contradicts itself or has a number out of range, or more options than can be
            searched.
        InvalidGraphError: Modules wait for each other in a cycle.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    name: str
    """What it is."""
    source: str = ""
    """Where its numbers come from: ``simulated`` or ``measured``, and how."""
    num_devices: int
    """Devices, all alike."""
    num_slots: int
    """Slots of each device."""
    memory_bytes: int = 0
    """Memory of each device in bytes; 0 limits nothing."""
    modules: tuple[InstanceModule, ...]
    """What to place."""
    disturbances: tuple[Disturbance, ...] = ()
    """Pairs of modules that slow each other down; pairs that are not listed do not."""

    def __post_init__(self) -> None:
        self._check_machine()
        if not self.modules:
            raise ValueError("modules is empty; give at least one module")
        twice = [name for name, count in Counter(module.name for module in self.modules).items() if count > 1]
        if twice or not all(module.name for module in self.modules):
            raise ValueError(f"modules have the names {twice or ['']} twice or empty; name each module once")
        if not self.name.isprintable():
            raise ValueError(f"name={self.name!r} has control characters; leave them out")
        self._check_size()
        for module in self.modules:
            _check_options(module)
        self._check_disturbances()
        _ = self.graph  # raises for unknown modules and cycles

    def _check_machine(self) -> None:
        found = f"num_devices={self.num_devices}, num_slots={self.num_slots}, memory_bytes={self.memory_bytes}"
        if self.num_devices < 1 or self.num_slots < 1 or self.memory_bytes < 0:
            raise ValueError(f"{found}; a machine has at least one device of one slot, and no negative memory")
        if self.num_devices > MAX_DEVICES or self.num_slots > MAX_SLOTS or self.memory_bytes > MAX_BYTES:
            raise ValueError(
                f"{found}; an instance has at most {MAX_DEVICES:,} devices of {MAX_SLOTS:,} slots and "
                f"{MAX_BYTES:,} bytes: take several slots as one, and 0 bytes for no limit"
            )

    def _check_size(self) -> None:
        num_options = sum(len(module.options) for module in self.modules)
        if num_options > MAX_OPTIONS:
            raise ValueError(
                f"{num_options:,} options are more than the {MAX_OPTIONS:,} that an instance may have; list quotas in "
                "larger steps, or fewer degrees"
            )
        cells = num_options * len(self.modules) * (self.num_slots + 1)
        if self.disturbances and cells > MAX_DISTURBED:
            raise ValueError(
                f"{num_options:,} options beside {len(self.modules)} modules on {self.num_slots} slots make "
                f"{cells:,} disturbances to look up, more than {MAX_DISTURBED:,}; take several slots as one, list "
                "quotas in larger steps, or leave disturbances out"
            )

    def _check_disturbances(self) -> None:
        names = {module.name for module in self.modules}
        seen: set[tuple[str, str]] = set()
        for one in self.disturbances:
            pair = (one.module, one.beside)
            if not set(pair) <= names or one.module == one.beside or pair in seen:
                raise ValueError(f"the disturbance of {pair[0]!r} by {pair[1]!r}: list two different modules once")
            if not all(0 <= share <= MAX_SHARE for share in (one.forward, one.backward)):
                raise ValueError(
                    f"the disturbance of {pair[0]!r} by {pair[1]!r} has shares {one.forward} and {one.backward}; "
                    f"neighbours cost 0 or more, and at most {MAX_SHARE:.0f} times the time alone"
                )
            seen.add(pair)

    @property
    def device(self) -> Device:
        """One of its devices."""
        return Device(name="instance", kind="cuda", num_slots=self.num_slots, memory_bytes=self.memory_bytes)

    @cached_property
    def graph(self) -> ModuleGraph:
        """What must come before what."""
        return ModuleGraph(
            modules=tuple(ModuleNode(name=module.name) for module in self.modules),
            edges=tuple(Edge(source=other, target=module.name) for module in self.modules for other in module.after),
        )


def _check_options(module: InstanceModule) -> None:
    of = f"module {module.name!r}"
    if not module.options:
        raise ValueError(f"{of} has no options; give it at least one degree and quota with its times")
    memory: dict[int, tuple[int, int, int]] = {}
    for option in module.options:
        times = (option.forward_ms, option.backward_ms)
        own = (option.memory_bytes, option.resident_bytes, option.activation_bytes)
        if option.degree < 1 or option.quota < 1 or min(own) < 0 or own[0] > MAX_BYTES:
            raise ValueError(
                f"{of} has {option}; degree and quota are at least 1, bytes at least 0 and at most {MAX_BYTES:,}"
            )
        if own[1] + own[2] > own[0]:
            raise ValueError(
                f"{of} keeps {own[1]} resident_bytes and {own[2]} activation_bytes at {_where(option)}, of "
                f"memory_bytes={own[0]}; both are parts of memory_bytes: give at least their sum"
            )
        if not all(0 <= time <= MAX_MS for time in times):
            raise ValueError(
                f"{of} has the times {times} at {_where(option)}; a time is finite and not negative, and at most "
                f"{MAX_MS:.0f} ms"
            )
        if memory.setdefault(option.degree, own) != own:
            raise ValueError(
                f"{of} needs (memory, resident, activation) {memory[option.degree]} and {own} bytes on {option.degree} "
                "devices; memory depends on the degree, not on the quota: give one number"
            )
    twice = repeated([(option.degree, option.quota) for option in module.options])
    if twice:
        raise ValueError(f"{of} has {len(twice)} options twice, first (degree, quota)={twice[0]}; list each once")


def _where(option: InstanceOption) -> str:
    return f"degree {option.degree}, quota {option.quota}"


def repeated(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns what occurs more than once."""
    return [pair for pair, count in Counter(pairs).items() if count > 1]
