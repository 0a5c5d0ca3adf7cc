"""Plans whose devices hold what modules keep over the whole step: the exact search, and one CP-SAT model.

During a stage a device holds what the stage's modules need (``DeploymentOption.memory_bytes``). Of modules of other
stages it holds what they keep: parameters, gradients, optimizer state and activations (``kept_bytes``). Therefore ::

    held(device) = sum of kept over its modules + the most that one stage's modules work with beyond that

in any order of the stages. Devices are alike, and a module's devices in one stage do not depend on those of another.

The exact search checks the memory of each stage alone, so its plan is a relaxation and its bound is a bound. Where
devices can be relabelled so that everything fits, it is the plan. Otherwise its stages get smaller quotas until CP-SAT
finds devices for them; lighter degrees are tried until such a plan is good; and a branch and bound over degrees, with
the same step in each part, improves it and raises the bound.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mosaic.cost import Cost
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.solver.exact import ExactResult, Objective, search_exactly
from mosaic.solver.limits import Countdown, SearchLimits
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.predict import PlacedTimes
from mosaic.solver.slots import Choice, lay_out
from mosaic.solver.stage import Machine, StageResult

Options = Mapping[str, Sequence[DeploymentOption]]
Stages = tuple[StageResult, ...]
Forbidden = Sequence[frozenset[str]]

RELAXED_SHARE = 0.4
"""Share of the effort for the relaxation."""
PLACE_EFFORT = 0.05
"""Effort of one question for devices of given options."""
PARTITION_EFFORT = 0.2
"""Effort of one question for quotas and devices of given stages and degrees."""
IN_TURN_EFFORT = 5.0
"""Effort after which it stays open whether any plan fits."""
MAX_FACTOR = 8.0
"""A stage is made slower by at most so much to find devices for it."""
HALVINGS = 5
"""Of the factor's logarithm."""
DIVE_SHARE = 0.25
"""Share of the effort that is left for each relaxation of the first plan that fits."""
CLIMB_SHARE = 0.3
"""Share of the effort that is left for better degrees; the proof has the rest."""
_VARIABLE_EFFORT = 4e-5
_ROUNDED_MS = 1e-6
"""What a time of the exact search may differ from a plan's: it counts whole nanoseconds of each module and phase."""


def keeps_anything(options: Options, machine: Machine) -> bool:
    """Returns whether memory held across stages can rule anything out."""
    return machine.memory_bytes > 0 and any(option.kept_bytes for own in options.values() for option in own)


def held_bytes(stages: Sequence[StageResult], num_devices: int) -> tuple[int, ...]:
    """Returns what each device holds at its fullest, in bytes."""
    kept, most = [0] * num_devices, [0] * num_devices
    for stage in stages:
        own_kept, working = _loads(stage, num_devices)
        kept = list(map(sum, zip(kept, own_kept, strict=True)))
        most = list(map(max, most, working))
    return tuple(map(sum, zip(kept, most, strict=True)))


def fits(stages: Sequence[StageResult], machine: Machine) -> bool:
    """Returns whether no device holds more than it has."""
    return not machine.memory_bytes or max(held_bytes(stages, machine.num_devices)) <= machine.memory_bytes


def _loads(stage: StageResult, num_devices: int) -> tuple[list[int], list[int]]:
    """Kept and working bytes of one stage on each device."""
    kept, working = [0] * num_devices, [0] * num_devices
    for option, devices in stage.choices.values():
        for device in devices:
            kept[device] += option.kept_bytes
            working[device] += option.working_bytes
    return kept, working


def place_stages(stages: Stages, machine: Machine, *, is_disturbed: bool = True) -> Stages | None:
    """Chooses devices that hold everything for modules with the options that they have; None: none were found.

    Heavy devices of a stage go to light ones, stage after stage. Where that does not fit, CP-SAT permutes the devices
    of stages, which keeps neighbours and their times, and at last places all modules anew.
    """
    if fits(stages, machine):
        return stages
    count = machine.num_devices
    kept = [0] * count
    greedy: list[StageResult] = []
    for stage in stages:
        own, _ = _loads(stage, count)
        heavy = sorted(range(count), key=lambda label: -own[label])
        light = sorted(range(count), key=lambda device: kept[device])
        target = dict(zip(heavy, light, strict=True))
        for label, device in target.items():
            kept[device] += own[label]
        greedy.append(_relabelled(stage, target, machine))
    if fits(greedy, machine):
        return tuple(greedy)
    if sum(kept) > count * machine.memory_bytes:
        return None
    if is_disturbed and (permuted := _permuted(stages, machine)) is not None:
        return permuted
    options = {name: (option,) for stage in stages for name, (option, _) in stage.choices.items()}
    partition = [tuple(stage.choices) for stage in stages]
    return _HeldModel(options, machine, partition, is_minimised=False).solve(PLACE_EFFORT).stages


def _permuted(stages: Stages, machine: Machine) -> Stages | None:
    from ortools.sat.python import cp_model

    model, devices = cp_model.CpModel(), range(machine.num_devices)
    goes = [{(a, b): model.new_bool_var("") for a in devices for b in devices} for _ in stages]
    works = [model.new_int_var(0, machine.memory_bytes, "") for _ in devices]
    held: list[Any] = list(works)
    for stage, to in zip(stages, goes, strict=True):
        kept, working = _loads(stage, machine.num_devices)
        for a in devices:
            model.add_exactly_one(to[a, b] for b in devices)
        for b in devices:
            model.add_exactly_one(to[a, b] for a in devices)
            model.add(sum(working[a] * to[a, b] for a in devices) <= works[b])
            held[b] += sum(kept[a] * to[a, b] for a in devices)
    for one in held:
        model.add(one <= machine.memory_bytes)
    solver = _solver(PLACE_EFFORT)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    targets = [{a: b for (a, b), chosen in to.items() if solver.boolean_value(chosen)} for to in goes]
    return tuple(_relabelled(stage, target, machine) for stage, target in zip(stages, targets, strict=True))


def _relabelled(stage: StageResult, target: Mapping[int, int], machine: Machine) -> StageResult:
    choices = {
        name: (option, tuple(sorted(target[device] for device in devices)))
        for name, (option, devices) in stage.choices.items()
    }
    return replace(stage, choices=choices, starts=lay_out(choices, machine.num_slots))


def place_in_turn(names: Sequence[str], options: Options, machine: Machine) -> Stages:
    """Puts every module into a stage of its own on devices that hold everything.

    Modules in stages of their own hold the least that any plan can: where this is infeasible, no plan exists.

    Raises:
        InfeasibleError: No plan fits, which is proven.
        UndecidedError: None was found, and it is not proven that none exists.
    """
    alone = {name: _fastest_by_degree(options[name]) for name in names}
    light = _place_lightest(alone, machine)
    most_ns = None if light is None else sum(stage.latency_ns for stage in light) - 1
    model = _HeldModel(alone, machine, [(name,) for name in names], most_ns=most_ns)
    answer = model.solve(IN_TURN_EFFORT / (5 if light else 1))
    found = answer.stages or light
    if found is None:
        raise _refusal(alone, machine, is_proven=answer.is_closed)
    return found


def _place_lightest(options: Options, machine: Machine) -> Stages | None:
    """Every module alone at its lightest degree, the heaviest first, on the devices that keep least."""
    kept, works = [0] * machine.num_devices, [0] * machine.num_devices
    placed: dict[str, StageResult] = {}
    lightest = {name: min(own, key=lambda o: (_on_all_devices(o), o.memory_bytes)) for name, own in options.items()}
    for name, option in sorted(lightest.items(), key=lambda item: -item[1].memory_bytes):
        devices = tuple(sorted(sorted(range(machine.num_devices), key=lambda g: kept[g])[: option.degree]))
        for device in devices:
            kept[device] += option.kept_bytes
            works[device] = max(works[device], option.working_bytes)
        starts = {name: (0,) * option.degree}
        placed[name] = StageResult(latency_ns=option.latency_ns, choices={name: (option, devices)}, starts=starts)
    if max(map(sum, zip(kept, works, strict=True))) > machine.memory_bytes:
        return None
    return tuple(placed[name] for name in options)


def _fastest_by_degree(options: Sequence[DeploymentOption]) -> tuple[DeploymentOption, ...]:
    best: dict[int, DeploymentOption] = {}
    for option in sorted(options, key=lambda o: (o.latency_ns, o.area, o)):
        best.setdefault(option.degree, option)
    return tuple(best.values())


def _refusal(options: Options, machine: Machine, *, is_proven: bool) -> InfeasibleError | UndecidedError:
    total = machine.num_devices * machine.memory_bytes
    least = sum(min(o.degree * o.kept_bytes for o in own) for own in options.values())
    reason = (
        f"what the {len(options)} modules keep across stages (parameters, gradients, optimizer state, activations) "
        f"takes {least:,} bytes at the least; {machine.num_devices} devices of {machine.memory_bytes:,} have {total:,}"
    )
    if least <= total:
        reason += ", and no choice of degrees and devices fits it into each of them beside what a module works with"
    reason += ": use a smaller batch, more devices, a sharded optimizer or activation checkpointing"
    if is_proven:
        return InfeasibleError("no plan fits into the devices' memory", reasons=[reason])
    return UndecidedError(
        f"no plan was found that devices of {machine.memory_bytes:,} bytes hold, and it is not proven that there "
        f"is none ({reason}); or search with hold_memory=False, which checks each stage's memory alone"
    )


def search_within_memory(
    graph: ModuleGraph,
    options: Options,
    *,
    cost: Cost,
    machine: Machine,
    objective: Objective = "phases",
    limits: SearchLimits | None = None,
    forbidden: Sequence[Collection[str]] = (),
    starts: Iterable[Stages] = (),
) -> ExactResult:
    """Finds a good plan whose devices hold everything, and proves it best where ``limits`` allow.

    Args:
        graph, options, cost, machine, objective, limits, forbidden: As in ``search_exactly``.
        starts: Plans that fit, to start from.

    Raises:
        ValueError, BackendUnavailableError: As ``search_exactly``.
        InfeasibleError: What is forbidden leaves no plan.
        UndecidedError: No plan was found, and it is not proven that none exists.
    """
    limits = limits or SearchLimits()
    search = _HeldSearch(
        graph=graph,
        options=options,
        cost=cost,
        machine=machine,
        objective=objective,
        limits=limits,
        forbidden=[frozenset(members) for members in forbidden],
        countdown=Countdown(limits),
    )
    return search.run(starts)


@dataclass(order=True)
class _Part:
    bound_ms: float
    number: int
    options: Options = field(compare=False)
    forbidden: Forbidden = field(compare=False)


def _divide(options: Options, relaxed: ExactResult) -> tuple[Options, Options] | None:
    """Splits off the relaxed plan's degree of the module that keeps most; None where every module has one degree."""
    chosen = [(name, option) for name, option in _options_of(relaxed) if len(_degrees(options[name])) > 1]
    if not chosen:
        return None
    name, option = max(chosen, key=lambda one: _on_all_devices(one[1]))
    same = tuple(o for o in options[name] if o.degree == option.degree)
    other = tuple(o for o in options[name] if o.degree != option.degree)
    return {**options, name: same}, {**options, name: other}


def _on_all_devices(option: DeploymentOption) -> int:
    return option.degree * option.kept_bytes


def _lighter(options: Options, chosen: Mapping[str, DeploymentOption]) -> Options | None:
    """Leaves lighter degrees only to the module that loses most by it; None where no module has any."""
    total = _on_all_devices
    lighter = {name: tuple(o for o in options[name] if total(o) < total(own)) for name, own in chosen.items()}
    names = [name for name, own in lighter.items() if own]
    if not names:
        return None
    name = max(names, key=lambda one: total(chosen[one]) - min(map(total, lighter[one])))
    return {**options, name: lighter[name]}


def _prune(options: Options, machine: Machine) -> Options | None:
    """Drops options that devices cannot hold even where every other module keeps its least; None: a module has none.

    Two modules with more devices together than there are share one, and both fit there.
    """
    total, count = machine.num_devices * machine.memory_bytes, machine.num_devices
    by_memory = {name: list({_memory_of(o): o for o in own}.values()) for name, own in options.items()}
    while True:
        least = {name: min(map(_on_all_devices, own)) for name, own in by_memory.items()}
        room = total - sum(least.values())

        def fits_beside(option: DeploymentOption, others: Sequence[DeploymentOption]) -> bool:
            return any(
                option.degree + o.degree <= count
                or option.kept_bytes + o.kept_bytes + max(option.working_bytes, o.working_bytes) <= machine.memory_bytes
                for o in others
            )

        kept = {
            name: [
                option
                for option in own
                if option.degree * option.memory_bytes - least[name] <= room
                and all(fits_beside(option, others) for beside, others in by_memory.items() if beside != name)
            ]
            for name, own in by_memory.items()
        }
        if not all(kept.values()):
            return None
        if kept == by_memory:
            break
        by_memory = kept
    possible = {name: set(map(_memory_of, own)) for name, own in by_memory.items()}
    return {name: tuple(o for o in own if _memory_of(o) in possible[name]) for name, own in options.items()}


def _memory_of(option: DeploymentOption) -> tuple[int, int, int]:
    return option.degree, option.kept_bytes, option.memory_bytes


def _least_quota(
    options: Sequence[DeploymentOption], chosen: DeploymentOption, stage: StageResult, factor: float
) -> DeploymentOption:
    """The smallest quota of the chosen degree with which a module keeps ``factor`` times the times of its stage."""
    forward_ns = factor * max(option.forward_ns for option, _ in stage.choices.values())
    backward_ns = factor * max(option.backward_ns for option, _ in stage.choices.values())
    enough = [
        o for o in options if o.degree == chosen.degree and o.forward_ns <= forward_ns and o.backward_ns <= backward_ns
    ]
    return min(enough, key=lambda o: (o.quota, o.latency_ns))


@dataclass
class _HeldSearch:
    graph: ModuleGraph
    options: Options
    cost: Cost
    machine: Machine
    objective: Objective
    limits: SearchLimits
    forbidden: Forbidden
    countdown: Countdown
    best: Stages = ()
    best_ms: float = float("inf")
    num_evaluations: int = 0
    _tried: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._times = PlacedTimes(self.cost)
        self.close_ms = 2 * len(self.graph.modules) * _ROUNDED_MS

    def run(self, starts: Iterable[Stages]) -> ExactResult:
        self.options = _prune(self.options, self.machine) or self.options
        relaxed = self.relax(self.options, self.countdown.part(RELAXED_SHARE if self.limits.exact else 0.8))
        bound_ms = relaxed.record.bound_ms
        if not self.offer(self.placed(relaxed.stages)) or self.best_ms > relaxed.cost_ms + self.close_ms:
            for stages in starts:
                self.offer(stages)
            self.dive(relaxed)
            self.climb()
            if self.limits.exact:
                bound_ms = max(bound_ms, self.branch(bound_ms))
        if not self.best:
            raise UndecidedError("no plan was found that keeps to what is forbidden and that the devices hold")
        bound_ms = min(bound_ms, self.best_ms)
        return ExactResult(
            stages=self.best,
            cost_ms=self.best_ms,
            record=SearchRecord(
                method="exact",
                num_evaluations=self.num_evaluations,
                status="optimal" if bound_ms >= self.best_ms - self.close_ms else "feasible",
                bound_ms=bound_ms,
            ),
        )

    def dive(self, relaxed: ExactResult) -> None:
        """Takes the heaviest degrees from one module after another, as long as the relaxed plan beats the best one."""
        options: Options | None = self.options
        while options is not None and relaxed.cost_ms < self.best_ms - self.close_ms and self.countdown.left > 0:
            self.offer(self.slowed(relaxed))
            lighter = _lighter(options, dict(_options_of(relaxed)))
            options = None if lighter is None else _prune(lighter, self.machine)
            if options is not None:
                relaxed = self.relax(options, replace(self.countdown.part(DIVE_SHARE), exact=False))

    def climb(self) -> None:
        """Tries one or two modules at other degrees than the best plan's, as long as that is better."""
        countdown = Countdown(self.countdown.part(CLIMB_SHARE))
        tried: set[tuple[int, ...]] = set()
        is_better = bool(self.best)
        while is_better:
            is_better = False
            now = {name: option.degree for stage in self.best for name, (option, _) in stage.choices.items()}
            moves = [{name: degree} for name in now for degree in _degrees(self.options[name]) if degree != now[name]]
            pairs = [first | second for first, second in itertools.combinations(moves, 2) if not first.keys() & second]
            for move in ({}, *moves, *pairs):
                degrees = now | move
                key = tuple(degrees[name] for name in self.graph.names)
                own = {name: tuple(o for o in self.options[name] if o.degree == degrees[name]) for name in degrees}
                if key in tried or _prune(own, self.machine) is None:
                    continue
                tried.add(key)
                if countdown.left <= 0:
                    return
                relaxed = self.relax(own, self.countdown.part(DIVE_SHARE))
                if relaxed.cost_ms < self.best_ms - self.close_ms and self.offer(self.slowed(relaxed)):
                    is_better = True
                    break

    def slowed(self, relaxed: ExactResult) -> Stages | None:
        """The stages and degrees of a relaxed plan, slower by the least factors at which there are devices for them.

        Slots are what a slower stage gives up: each module has the smallest quota that keeps its stage's times. All
        stages get one factor first; then one after the other becomes as fast as the rest allows.
        """
        count = len(relaxed.stages)
        factors = [MAX_FACTOR] * count
        found = self.placed_at(factors, relaxed)
        for indices in (range(count), *([index] for index in range(count))):
            low, high = 1.0, factors[indices[0]]
            for step in range(HALVINGS + 1):
                if found is None or high == 1.0:
                    break
                middle = math.sqrt(low * high) if step else 1.0
                tried = [middle if index in indices else old for index, old in enumerate(factors)]
                better = self.placed_at(tried, relaxed)
                if better is None:
                    low = middle
                else:
                    found, factors, high = better, tried, middle
        return found

    def placed_at(self, factors: Sequence[float], relaxed: ExactResult) -> Stages | None:
        """The stages of a relaxed plan with quotas for as many times their times, on devices that hold them."""
        options = {
            name: (_least_quota(self.options[name], option, stage, factor),)
            for stage, factor in zip(relaxed.stages, factors, strict=True)
            for name, (option, _) in stage.choices.items()
        }
        partition = [tuple(stage.choices) for stage in relaxed.stages]
        return _HeldModel(options, self.machine, partition, is_minimised=False).solve(PLACE_EFFORT, self.spend).stages

    def relax(self, options: Options, limits: SearchLimits, forbidden: Forbidden | None = None) -> ExactResult:
        found = search_exactly(
            self.graph,
            options,
            cost=self.cost,
            machine=self.machine,
            objective=self.objective,
            limits=limits,
            forbidden=self.forbidden if forbidden is None else forbidden,
        )
        self.num_evaluations += found.record.num_evaluations
        return found

    def placed(self, stages: Stages) -> Stages | None:
        self.spend(PLACE_EFFORT / 5)
        return place_stages(stages, self.machine, is_disturbed=not self.cost.interference.is_zero)

    def model(self, stages: Stages, options: Options) -> _HeldModel:
        """The model of given stages; what it finds is better than the best plan, without interference."""
        most_ns = None if self.best_ms == float("inf") else round(self.best_ms * NS_PER_MS) - 1
        partition = [tuple(stage.choices) for stage in stages]
        return _HeldModel(options, self.machine, partition, most_ns=most_ns, by_sum=self._by_sum)

    def branch(self, bound_ms: float) -> float:
        """Divides the problem until nothing below the best plan is open or the effort is spent; returns the bound.

        A part is relaxed like the whole. It is divided by the degree of the module that keeps most. Where every module
        has one degree, CP-SAT solves the relaxed plan's own stages, and each further part lacks one of them.
        """
        parts = [_Part(bound_ms, 0, self.options, tuple(self.forbidden))]
        unsettled_ms = float("inf")
        numbers = itertools.count(1)
        while parts and parts[0].bound_ms < self.best_ms - self.close_ms and self.countdown.left > 0:
            part = heapq.heappop(parts)
            try:
                relaxed = self.relax(part.options, self.countdown.part(), part.forbidden)
            except InfeasibleError:
                continue
            below_ms = max(part.bound_ms, relaxed.record.bound_ms)
            placed = self.placed(relaxed.stages) if relaxed.cost_ms < self.best_ms - self.close_ms else None
            is_best = self.offer(placed) and relaxed.record.status == "optimal"
            if placed is None:
                self.offer(self.slowed(relaxed))
            if below_ms >= self.best_ms - self.close_ms or (
                is_best and self.best_ms <= relaxed.cost_ms + self.close_ms
            ):
                continue
            divided = _divide(part.options, relaxed)
            children: list[tuple[Options, Forbidden]]
            if divided is None:
                answer = self.model(relaxed.stages, part.options).solve(PARTITION_EFFORT, self.spend)
                self.offer(answer.stages)
                if not (answer.is_closed and self.cost.interference.is_zero):
                    unsettled_ms = min(unsettled_ms, below_ms)
                sets = (frozenset(stage.choices) for stage in relaxed.stages)
                children = [(part.options, (*part.forbidden, members)) for members in sets]
            else:
                pruned = [_prune(options, self.machine) for options in divided]
                children = [(options, part.forbidden) for options in pruned if options and self.has_place(options)]
            for options, forbidden in children:
                heapq.heappush(parts, _Part(below_ms, next(numbers), options, forbidden))
        open_ms = parts[0].bound_ms if parts else float("inf")
        return min(open_ms, unsettled_ms, self.best_ms)

    def has_place(self, options: Options) -> bool:
        """False only where devices cannot hold the modules, whatever the stages."""
        alone = {name: _fastest_by_degree(own) for name, own in options.items()}
        if _place_lightest(alone, self.machine) is not None:
            return True
        model = _HeldModel(alone, self.machine, [(name,) for name in alone], is_minimised=False)
        answer = model.solve(PLACE_EFFORT, self.spend)
        return answer.stages is not None or not answer.is_closed

    @property
    def _by_sum(self) -> bool:
        return self.objective == "sum"

    def spend(self, effort: float) -> None:
        self.countdown.spend(effort)

    def offer(self, stages: Stages | None) -> bool:
        """Takes stages if they are better than the best plan; returns whether they are."""
        if stages is None or any(frozenset(stage.choices) in self.forbidden for stage in stages):
            return False
        total_ms = sum(map(self.stage_ms, stages))
        if total_ms >= self.best_ms - self.close_ms:
            return False
        self.best, self.best_ms = stages, total_ms
        return True

    def stage_ms(self, stage: StageResult) -> float:
        if self._by_sum:
            return max(sum(times) for times in self._times.of(stage.choices).values())
        return self._times.stage_ms(stage.choices)


def _options_of(result: ExactResult) -> list[tuple[str, DeploymentOption]]:
    return [(name, option) for stage in result.stages for name, (option, _) in stage.choices.items()]


def _degrees(options: Sequence[DeploymentOption]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(option.degree for option in options))


def worthwhile(options: Sequence[DeploymentOption]) -> tuple[DeploymentOption, ...]:
    """Returns the options of each degree without those that a smaller quota matches in both phases."""
    kept: list[DeploymentOption] = []
    for option in sorted(options, key=lambda o: (o.degree, o.quota, o.latency_ns)):
        if not any(
            k.degree == option.degree and k.forward_ns <= option.forward_ns and k.backward_ns <= option.backward_ns
            for k in kept
        ):
            kept.append(option)
    return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    stages: Stages | None
    """None where none were found."""
    is_closed: bool
    """Whether the stages are proven best, or None proven right."""


class _HeldModel:
    """The CP-SAT model of given stages: an option and devices for each module, without interference.

    ``pick[m][o]``: module m uses option o. ``keeps[m, d, g]``: it has d devices and g is one of them. The objective is
    the sum over stages of the slowest forward and the slowest backward.
    """

    def __init__(
        self,
        options: Options,
        machine: Machine,
        partition: Sequence[Sequence[str]],
        *,
        most_ns: int | None = None,
        by_sum: bool = False,
        is_minimised: bool = True,
    ) -> None:
        """Builds the model.

        Args:
            options: Of each module; memory depends on the degree alone.
            machine: What there is to place on.
            partition: The stages.
            most_ns: The most that the objective may be.
            by_sum: Whether a stage takes its slowest module, forward and backward together (the paper's Eq. 4).
            is_minimised: Whether the best is wanted, or any.
        """
        from ortools.sat.python import cp_model  # 0.3 s to import; only searches need it

        self.model = cp_model.CpModel()
        self.machine, self.devices = machine, range(machine.num_devices)
        self.partition = [tuple(names) for names in partition]
        self.options = {name: worthwhile(options[name]) for names in partition for name in names}
        self.works = [self.model.new_int_var(0, machine.memory_bytes, "") for _ in self.devices]
        self.pick: dict[str, list[Any]] = {}
        self.keeps: dict[tuple[str, int, int], Any] = {}
        self.on: dict[tuple[str, int], Any] = {}
        for name in self.options:
            self.add_module(name)
        self.add_memory()
        self.break_symmetry()
        longest_ns = sum(max(option.latency_ns for option in own) for own in self.options.values())
        limit_ns = longest_ns if most_ns is None else most_ns
        times = [time for names in self.partition for time in self.add_stage(names, limit_ns, by_sum=by_sum)]
        if is_minimised:
            self.model.add(sum(times) <= limit_ns)
            self.model.minimize(sum(times))

    def add_module(self, name: str) -> None:
        """One option, on as many devices as its degree."""
        own = self.options[name]
        self.pick[name] = [self.model.new_bool_var("") for _ in own]
        self.model.add_exactly_one(self.pick[name])
        for degree in _degrees(own):
            for device in self.devices:
                self.keeps[name, degree, device] = self.model.new_bool_var("")
            has_degree = sum(pick for pick, o in zip(self.pick[name], own, strict=True) if o.degree == degree)
            self.model.add(sum(self.keeps[name, degree, device] for device in self.devices) == degree * has_degree)
        for device in self.devices:
            self.on[name, device] = self.model.new_bool_var("")
            self.model.add(self.on[name, device] == sum(self.keeps[name, d, device] for d in _degrees(own)))

    def total(self, name: str, value: Callable[[DeploymentOption], int]) -> Any:
        """The value of the option that a module uses."""
        return sum(value(o) * pick for o, pick in zip(self.options[name], self.pick[name], strict=True))

    def add_stage(self, names: Sequence[str], longest_ns: int, *, by_sum: bool) -> list[Any]:
        """Slots (paper Eq. 5) and working memory of each device; returns the times of which a stage consists."""
        for device in self.devices:
            held = [self.held_slots(name, device) for name in names]
            self.model.add(sum(held) <= self.machine.num_slots)
            working = [
                _of_degree(self.options[name], degree).working_bytes * self.keeps[name, degree, device]
                for name in names
                for degree in _degrees(self.options[name])
            ]
            self.model.add(sum(working) <= self.works[device])
        area = sum(self.total(name, lambda o: o.area) for name in names)  # implied
        self.model.add(area <= self.machine.num_devices * self.machine.num_slots)
        phases: list[Callable[[DeploymentOption], int]] = [lambda o: o.forward_ns, lambda o: o.backward_ns]
        if by_sum:
            phases = [lambda o: o.latency_ns]
        times = [self.model.new_int_var(0, longest_ns, "") for _ in phases]
        for name in names:
            for time, phase in zip(times, phases, strict=True):
                self.model.add(time >= self.total(name, phase))
        return times

    def held_slots(self, name: str, device: int) -> Any:
        """A module's quota where it is on a device, otherwise 0."""
        quotas = {option.quota for option in self.options[name]}
        if len(quotas) == 1:
            return quotas.pop() * self.on[name, device]
        held = self.model.new_int_var(0, self.machine.num_slots, "")
        self.model.add(held >= self.total(name, lambda o: o.quota)).only_enforce_if(self.on[name, device])
        return held

    def add_memory(self) -> None:
        """What a device's modules keep, and the most that one stage works with."""
        kept: list[list[Any]] = [[] for _ in self.devices]
        for (name, degree, device), keeps in self.keeps.items():
            kept[device].append(_of_degree(self.options[name], degree).kept_bytes * keeps)
        for device in self.devices:
            self.model.add(sum(kept[device]) + self.works[device] <= self.machine.memory_bytes)

    def break_symmetry(self) -> None:
        """The module that keeps most has the first devices."""
        first = max(self.options, key=lambda name: max(option.kept_bytes for option in self.options[name]))
        for device in self.devices[:-1]:
            self.model.add_implication(self.on[first, device + 1], self.on[first, device])

    def solve(self, effort: float, spend: Callable[[float], object] = lambda effort: None) -> _Answer:
        """Solves within an effort, in CP-SAT's deterministic time, and tells ``spend`` what it took."""
        from ortools.sat.python import cp_model

        solver = _solver(effort)
        status = solver.solve(self.model)
        spend(solver.response_proto.deterministic_time + _VARIABLE_EFFORT * len(self.model.proto.variables))
        is_closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Answer(stages=None, is_closed=is_closed)
        stages = []
        for names in self.partition:
            choices: dict[str, Choice] = {}
            for name in names:
                (option,) = (
                    o for o, pick in zip(self.options[name], self.pick[name], strict=True) if solver.boolean_value(pick)
                )
                devices = tuple(device for device in self.devices if solver.boolean_value(self.on[name, device]))
                choices[name] = option, devices
            latency_ns = max(option.latency_ns for option, _ in choices.values())
            starts = lay_out(choices, self.machine.num_slots)
            stages.append(StageResult(latency_ns=latency_ns, choices=choices, starts=starts))
        return _Answer(stages=tuple(stages), is_closed=is_closed)


def _of_degree(options: Sequence[DeploymentOption], degree: int) -> DeploymentOption:
    return next(option for option in options if option.degree == degree)


def _solver(effort: float) -> Any:
    """A solver whose answers are repeatable: one thread, a fixed seed, limits in deterministic time."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # or it leaves the process without Python's own handler
    return solver
