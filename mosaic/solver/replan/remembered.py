"""Facts about single modules and stages: worked out once, and kept for the plans that follow.

A solve asks here for options, for every module alone, and for what becomes of a stage that was found. A first solve
starts from nothing. A later one finds what holds for it too, and whether it does is looked at piece by piece:

* of a *module*, everything, where the cost model is the same object, or says the same of it (``SaysWhatItKnows``), on
  the same device, as many of them, and the same grid;
* of a *stage* (spare slots, times beside each other), where that is so of all its modules, and neighbours cost nothing
  or the cost model is the same object;
* of *slots*, as long as all stages before are the same.

So a plan from here is the plan that a first solve would make of the same stages. A cost model must not change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord, Stage
from mosaic.solver.exact.search import Knowledge
from mosaic.solver.options import DeploymentOption, QuotaGrid, all_options
from mosaic.solver.predict import PlacedTimes, build_stage
from mosaic.solver.spare import spend_spare_slots
from mosaic.solver.stage import Machine, StageResult, alone
from mosaic.solver.stagger import Stagger

MAX_STAGES = 4096
"""Stages that are kept; beyond, all are let go."""
MAX_ANSWERS = 16
"""Problems whose proven answer is kept; beyond, the one that was asked for longest ago is let go."""
MAX_MODULES = 256
"""Modules that are kept; beyond, those that are gone are let go."""


@runtime_checkable
class SaysWhatItKnows(Protocol):
    """A cost model that can say whether it and another one answer alike for a module."""

    def facts(self, module: str) -> Hashable:
        """Returns what decides times, memory, degrees and quotas of a module alone: equal facts, equal answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModule:
    """A module as one cost model has it on one kind of machine."""

    number: int
    """Another one whenever anything about the module may have changed."""
    options: tuple[DeploymentOption, ...]
    """How it may be deployed."""
    alone: StageResult
    """The stage in which it is alone, at its fastest."""
    alone_ms: float
    """What that takes."""
    keeps: bool
    """Whether any option keeps memory while other stages run."""
    facts: Hashable
    """Of the cost model; None where it has none to give."""


@dataclass(slots=True)
class _KnownStage:
    found: StageResult
    widened: StageResult | None = None
    total_ms: float | None = None
    built: Stage | None = None


_Basis = tuple[Device, int, QuotaGrid]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenStages:
    """What a search proved to be best."""

    stages: tuple[StageResult, ...]
    """As found, before anything else is done to them."""
    record: SearchRecord
    """Of the search that found them."""
    known: Knowledge | None
    """What it found out about sets of modules."""


class Remembered:
    """Kept by whoever plans again and again; a solve without one makes its own.

    Attributes:
        num_listed: Modules whose options were listed so far.
        num_finished: Stages whose spare slots and times were worked out so far.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self.num_listed = 0
        self.num_finished = 0
        self._basis: _Basis | None = None
        self._cost: Cost | None = None
        self._interference: object = None
        self._is_alone = True
        self._modules: dict[str, KnownModule] = {}
        self._stages: dict[tuple[object, ...], _KnownStage] = {}
        self._answers: dict[Hashable, ProvenStages] = {}
        self._entries: dict[int, tuple[StageResult, _KnownStage]] = {}  # of this solve, by identity
        self._stagger: Stagger | None = None

    def begin(
        self, graph: ModuleGraph, *, cost: Cost, device: Device, num_devices: int, grid: QuotaGrid
    ) -> dict[str, tuple[DeploymentOption, ...]]:
        """Returns the options of all modules of a graph, and forgets what does not hold any more.

        Raises:
            InfeasibleError, ValueError: As ``all_options``.
        """
        basis, names = (device, num_devices, grid), graph.names
        if basis != self._basis:
            self._forget()
        is_same = cost is self._cost and cost.interference is self._interference
        if not is_same:
            if self._cost is not None and not (cost.interference.is_zero and self._is_alone):
                self._stages.clear()
                self._answers.clear()
            self._times = PlacedTimes(cost)
            self._is_alone = cost.interference.is_zero
        if len(self._stages) > MAX_STAGES:
            self._stages.clear()
        # What ``SaysWhatItKnows`` asks for; to look a protocol up takes longer than all facts do.
        facts_of: Callable[[str], Hashable] | None = getattr(cost, "facts", None)
        facts = {} if is_same or facts_of is None else {name: facts_of(name) for name in names}
        stale = [name for name in names if not self._holds(name, is_same, facts.get(name))]
        try:
            self._list(stale, cost, basis, facts_of)
        except InfeasibleError:
            self._forget()
            raise
        self._basis, self._cost, self._interference = basis, cost, cost.interference
        self._machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
        if not is_same:
            self._drop_incomparable(names)
        self._options = {name: self._modules[name].options for name in names}
        self._entries.clear()
        return self._options

    def _forget(self) -> None:
        self._modules.clear()
        self._stages.clear()
        self._answers.clear()
        self._stagger = None
        self._cost = None

    def _drop_incomparable(self, names: Sequence[str]) -> None:
        """A module that is gone is known when it comes back only where its facts can be compared then."""
        is_full = len(self._modules) > MAX_MODULES
        gone = self._modules.keys() - set(names)
        for name in gone:
            if is_full or self._modules[name].facts is None:
                del self._modules[name]

    def _holds(self, name: str, is_same: bool, facts: Hashable) -> bool:
        known = self._modules.get(name)
        return known is not None and (is_same or (facts is not None and known.facts == facts))

    def _list(
        self, names: Sequence[str], cost: Cost, basis: _Basis, facts_of: Callable[[str], Hashable] | None
    ) -> None:
        device, num_devices, grid = basis
        listed = all_options(names, cost=cost, device=device, num_devices=num_devices, grid=grid)
        for name, options in listed.items():
            self.num_listed += 1
            found = alone(name, options)
            self._modules[name] = KnownModule(
                number=self.num_listed,
                options=options,
                alone=found,
                alone_ms=self._times.stage_ms(found.choices),
                keeps=any(option.kept_bytes for option in options),
                facts=facts_of(name) if facts_of else None,
            )

    def ask(self, graph: ModuleGraph, how: Hashable) -> tuple[Hashable, ProvenStages | None]:
        """Returns the answer to a problem that was solved before; None if it was not, or not proven.

        Args:
            graph: Of the latest ``begin``.
            how: All that decides what is best beside modules, machine and what neighbours cost.

        Returns:
            The key to ``keep`` an answer by, and the answer.
        """
        numbers = tuple([(name, self._modules[name].number) for name in graph.topological_order()])
        key = numbers, graph.edges, how
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._answers[key] = answer  # the latest
        return key, answer

    def keep(self, key: Hashable, answer: ProvenStages) -> None:
        """Takes the answer to a problem, if it is proven."""
        if answer.record.status != "optimal":
            return
        self._answers[key] = answer
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    @property
    def machine(self) -> Machine:
        """What there is to place on."""
        return self._machine

    @property
    def keeps_anything(self) -> bool:
        """Whether memory held across stages can rule anything out."""
        return self._machine.memory_bytes > 0 and any(self._modules[name].keeps for name in self._options)

    def in_turn(self, order: Iterable[str]) -> tuple[StageResult, ...]:
        """Returns the modules one after the other, each at the degree and quota at which it is fastest alone."""
        return tuple(self._modules[name].alone for name in order)

    def total_ms(self, stages: Sequence[StageResult]) -> float:
        """Returns what stages take after each other: of each its slowest forward and its slowest backward."""
        return sum(self.stage_ms(stage) for stage in stages)

    def stage_ms(self, stage: StageResult) -> float:
        """Returns what one stage takes, in milliseconds."""
        if len(stage.choices) == 1:
            known = self._modules[next(iter(stage.choices))]
            if known.alone is stage:
                return known.alone_ms
        entry = self._entry(stage)
        if entry.total_ms is None:
            entry.total_ms = self._times.stage_ms(stage.choices)
        return entry.total_ms

    def widen(self, stage: StageResult) -> StageResult:
        """Returns a stage with its spare slots given to modules that gain from them."""
        entry = self._entry(stage)
        if entry.widened is None:
            entry.widened = spend_spare_slots(entry.found, self._options, times=self._times, machine=self._machine)
        return entry.widened

    def build(self, stage: StageResult) -> Stage:
        """Returns a stage as a plan has it."""
        entry = self._entry(stage)
        if entry.built is None:
            entry.built = build_stage(stage, self._times)
        return entry.built

    def stagger(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Returns stages on slots that are free early (``stagger.py``)."""
        if self._stagger is None:
            self._stagger = Stagger(num_devices=self._machine.num_devices, num_slots=self._machine.num_slots)
        return self._stagger.place(stages)

    def _entry(self, stage: StageResult) -> _KnownStage:
        seen = self._entries.get(id(stage))
        if seen is not None:
            return seen[1]
        modules, starts = self._modules, stage.starts
        key = tuple(
            [
                (name, modules[name].number, option.degree, option.quota, devices, starts[name])
                for name, (option, devices) in stage.choices.items()
            ]
        )
        entry = self._stages.get(key)
        if entry is None:
            self.num_finished += 1
            entry = self._stages[key] = _KnownStage(stage)
        self._entries[id(stage)] = stage, entry  # which keeps the stage, and so its identity
        return entry
