"""A schedule of waves: what a comparison planner answers, modules sliced or not, as plain data.

``Plan`` holds each module once. Spindle runs slices of a module in several waves, so its answer needs this wider form::

    wave      0                 1
    gpu 0,1   image[0:8/12]     image[8:12/12]      forward: left to right, backward: right to left;
    gpu 2     text[0:9/12]      text[9:12/12]       a wave ends when its slowest run does
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mosaic.artifact import Ge
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import InvalidPlanError
from mosaic.graph import ModuleGraph
from mosaic.plan import Placement, Plan, SearchRecord, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive operators of one module: all of them, or a slice."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """Name in the graph."""
    first: Annotated[int, Ge(0)] = 0
    """Index of its first operator."""
    count: Annotated[int, Ge(1)] = 1
    """Operators in this part."""
    total: Annotated[int, Ge(1)] = 1
    """Operators of the whole module."""
    forward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted forward time of this part, in milliseconds."""
    backward_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted backward time of this part, in milliseconds."""

    @property
    def share(self) -> float:
        """Share of the module's work, above 0 and at most 1."""
        return self.count / self.total

    @property
    def is_whole(self) -> bool:
        """Whether it is the module, unsliced."""
        return self.count == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Parts that run one after the other on devices of their own."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    parts: tuple[Part, ...]
    """In the order of their forward pass; more than one only where a chain of modules was contracted."""
    devices: tuple[int, ...]
    """Device indices; their number is the data-parallel degree."""
    quota: Annotated[int, Ge(1)]
    """Slots on each of them: the whole device, or what the module does best with where it runs alone."""

    @property
    def forward_ms(self) -> float:
        """Predicted forward time of all parts in turn, in milliseconds."""
        return sum(part.forward_ms for part in self.parts)

    @property
    def backward_ms(self) -> float:
        """Predicted backward time of all parts in turn, in milliseconds."""
        return sum(part.backward_ms for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Runs at the same time on disjoint devices."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    runs: tuple[Run, ...]
    """At least one."""

    @property
    def forward_ms(self) -> float:
        """Predicted time of its slowest forward, in milliseconds."""
        return max(run.forward_ms for run in self.runs)

    @property
    def backward_ms(self) -> float:
        """Predicted time of its slowest backward, in milliseconds."""
        return max(run.backward_ms for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a part runs, by the prediction."""

    part: Part
    """What runs."""
    phase: Literal["forward", "backward"]
    """Half of the step."""
    wave: int
    """Index of its wave."""
    devices: tuple[int, ...]
    """Where."""
    start_ms: float
    """Start in milliseconds from the step's beginning."""
    end_ms: float
    """End in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WavePlan:
    """Waves in order, that together run every operator of every module once.

    Raises:
        InvalidPlanError: A wave is empty, gives a device to two runs, or names one that is not there.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    device: Device
    """What one of the devices is."""
    num_devices: Annotated[int, Ge(1)]
    """How many of them."""
    waves: tuple[Wave, ...]
    """In the order of their forward pass; backward takes them in reverse."""
    graph: str
    """Fingerprint of the module graph."""
    profile: str | None = None
    """Fingerprint of the profile behind the times; None where there is none."""
    sequential_ms: Annotated[float, Ge(0)] = 0.0
    """Predicted time of every module in turn, each at its own best, in milliseconds."""
    search: SearchRecord
    """How it was found."""

    def __post_init__(self) -> None:
        for index, wave in enumerate(self.waves):
            held = [device for run in wave.runs for device in run.devices]
            if not wave.runs or not all(run.parts and run.devices for run in wave.runs):
                raise InvalidPlanError(f"wave {index} has nothing to run or nowhere to run it; leave it out")
            if len(set(held)) < len(held):
                raise InvalidPlanError(f"wave {index} holds devices {held}; a wave gives each device to one run")
            if not all(0 <= device < self.num_devices for device in held):
                raise InvalidPlanError(
                    f"wave {index} holds devices {held}; this schedule has devices 0 to {self.num_devices - 1}"
                )
            for run in wave.runs:
                self.device.check_quota(run.quota, of=f"wave {index}")

    @property
    def predicted_ms(self) -> float:
        """Predicted step: each wave's slowest forward and slowest backward, added up, in milliseconds."""
        return sum(wave.forward_ms + wave.backward_ms for wave in self.waves)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, wave after wave."""
        return tuple(part for wave in self.waves for run in wave.runs for part in run.parts)

    @property
    def sliced(self) -> tuple[str, ...]:
        """Modules that run in more than one part, sorted."""
        return tuple(sorted({part.module for part in self.parts if not part.is_whole}))

    @property
    def is_runnable(self) -> bool:
        """Whether ``as_plan`` can express it: no module is sliced."""
        return not self.sliced

    def spans(self) -> tuple[Span, ...]:
        """Returns when every part runs forward, then backward, with a barrier after each wave."""
        order: list[tuple[int, Literal["forward", "backward"]]] = [(i, "forward") for i in range(len(self.waves))]
        order += [(i, "backward") for i in reversed(range(len(self.waves)))]
        found: list[Span] = []
        now = 0.0
        for index, phase in order:
            wave = self.waves[index]
            for run in wave.runs:
                found.extend(_spans_of(run, index, phase, now))
            now += wave.forward_ms if phase == "forward" else wave.backward_ms
        return tuple(found)

    def as_plan(self, graph: ModuleGraph) -> Plan:
        """Returns the same schedule as a plan that can be run.

        A wave is a stage. Where it runs a chain, its second modules are another stage, and so on; nothing waits for a
        stage's end when it runs, so what runs when is the same. It is predicted to take the same time, or more where a
        chain runs beside something else: stages are predicted with barriers.

        Raises:
            InvalidPlanError: A module is sliced, or the graph is another one.
        """
        if not self.is_runnable:
            raise InvalidPlanError(
                f"the {self.search.method} schedule cannot be run as a plan: it slices {', '.join(self.sliced)}, and a "
                "plan holds whole modules; with one operator a module nothing is sliced, and layers that are placed "
                "as modules are what such a schedule slices between"
            )
        if self.graph != graph.fingerprint:
            raise InvalidPlanError(
                f"the schedule was made for graph {self.graph}, not {graph.fingerprint}; plan again for this model"
            )
        plan = Plan(
            device=self.device,
            num_devices=self.num_devices,
            stages=tuple(stage for wave in self.waves for stage in _stages_of(wave)),
            graph=self.graph,
            profile=self.profile,
            sequential_ms=self.sequential_ms,
            search=self.search,
        )
        plan.check_covers(graph)
        return plan


def _spans_of(run: Run, wave: int, phase: Literal["forward", "backward"], start_ms: float) -> Iterator[Span]:
    for part in run.parts if phase == "forward" else reversed(run.parts):
        end_ms = start_ms + (part.forward_ms if phase == "forward" else part.backward_ms)
        yield Span(part=part, phase=phase, wave=wave, devices=run.devices, start_ms=start_ms, end_ms=end_ms)
        start_ms = end_ms


def _stages_of(wave: Wave) -> Iterator[Stage]:
    """A stage for a wave; where it runs chains, one for the first modules of all, one for the second ones, ..."""
    for place in range(max(len(run.parts) for run in wave.runs)):
        yield Stage(placements=tuple(_placement(run.parts[place], run) for run in wave.runs if place < len(run.parts)))


def _placement(part: Part, run: Run) -> Placement:
    return Placement(
        module=part.module,
        slots=tuple(range(run.quota)),
        devices=tuple(sorted(run.devices)),
        forward_ms=part.forward_ms,
        backward_ms=part.backward_ms,
    )
