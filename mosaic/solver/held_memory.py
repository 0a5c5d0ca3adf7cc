"""Plans within the memory that modules hold over the whole step: a branch and bound over the exact search.

During a stage a device holds the whole memory of the stage's modules (``DeploymentOption.memory_bytes``). Of the
modules of other stages it holds parameters, gradients, optimizer state and activations (``kept_bytes``). Therefore ::

    held(device) = sum of kept_bytes over its modules + maximum over stages of their modules' working bytes

in any order of the stages. Devices are equal, and a module's devices in one stage do not depend on those of another.

The exact search checks the memory of each stage alone, so it solves a relaxation and its bound holds. If
``find_devices`` places its plan within memory, that is the plan. Otherwise its stages give up slots until they fit,
other degrees are tried, and a branch and bound over degrees improves the plan and raises the bound. CP-SAT solves
stages with fixed degrees.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mosaic.cost import Cost
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.solver.exact import ExactResult, search_exactly
from mosaic.solver.limits import Countdown, SearchLimits, repeatable_solver
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.predict import PlacedTimes
from mosaic.solver.stage import Choice, Machine, StageResult

Options = Mapping[str, Sequence[DeploymentOption]]
Stages = tuple[StageResult, ...]
Partition = Sequence[Sequence[str]]
Forbidden = Sequence[frozenset[str]]

RELAXED_SHARE = 0.4
"""Share of the effort for the relaxation."""
CLIMB_SHARE = 0.3
"""Share of the remaining effort for better degrees; the proof gets the rest."""
PART_SHARE = 0.25
"""Share of the remaining effort for each relaxation before the proof."""
MAX_NODES = 300
"""Maximum number of device sets to try for the modules of one plan."""
NODE_EFFORT, PLACING_EFFORT = 1.2e-5, 1e-4
"""Effort of one device set, and the fixed effort of a placement."""
STAGES_EFFORT = 0.2
"""Effort to choose quotas and devices for fixed stages and degrees."""
IN_TURN_EFFORT = 5.0
"""Effort after which the existence of a plan stays undecided."""
MAX_FACTOR, HALVINGS = 8.0, 5
"""Maximum slowdown of stages, and the number of bisections of its logarithm."""
_VARIABLE_EFFORT = 4e-5
_ROUNDED_MS = 1e-6
"""Rounding of the exact search, which counts whole nanoseconds per module and phase."""


def keeps_anything(options: Options, machine: Machine) -> bool:
    """Returns True if memory held across stages can rule out a plan."""
    return machine.memory_bytes > 0 and any(option.kept_bytes for own in options.values() for option in own)


def fits(stages: Sequence[StageResult], machine: Machine) -> bool:
    """Returns True if stages fit into the memory of their devices."""
    resident, works = [0] * machine.num_devices, [0] * machine.num_devices
    for stage in stages:
        stage_resident, stage_works = _loads(stage, machine.num_devices)
        resident = list(map(sum, zip(resident, stage_resident, strict=True)))
        works = list(map(max, works, stage_works))
    return not machine.memory_bytes or max(map(sum, zip(resident, works, strict=True))) <= machine.memory_bytes


def _loads(stage: StageResult, num_devices: int) -> tuple[list[int], list[int]]:
    """Returns the held and working bytes of one stage on each device."""
    resident, works = [0] * num_devices, [0] * num_devices
    for option, devices in stage.choices.values():
        for device in devices:
            resident[device] += option.kept_bytes
            works[device] += option.working_bytes
    return resident, works


def _stage_of(choices: Mapping[str, Choice]) -> StageResult:
    return StageResult(latency_ns=max(option.latency_ns for option, _ in choices.values()), choices=choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Stages that fit into memory, if any."""

    stages: Stages | None
    is_closed: bool
    """True if the stages are proven optimal, or their absence is proven."""
    effort: float
    """Effort of the search."""


def place_stages(stages: Stages, machine: Machine) -> Stages | None:
    """Returns modules with devices that hold their options; None if none were found.

    Assigns the heavy devices of each stage to light ones, which keeps neighbours and their times. If that does not fit,
    places all modules anew.
    """
    if fits(stages, machine):
        return stages
    resident = [0] * machine.num_devices
    greedy: list[StageResult] = []
    for stage in stages:
        own, _ = _loads(stage, machine.num_devices)
        heavy = sorted(range(machine.num_devices), key=lambda label: -own[label])
        light = sorted(range(machine.num_devices), key=lambda device: resident[device])
        target = dict(zip(heavy, light, strict=True))
        for label, device in target.items():
            resident[device] += own[label]
        choices = {
            name: (option, tuple(sorted(target[device] for device in devices)))
            for name, (option, devices) in stage.choices.items()
        }
        greedy.append(replace(stage, choices=choices))
    if fits(greedy, machine):
        return tuple(greedy)
    return find_devices(
        {name: (option,) for stage in stages for name, (option, _) in stage.choices.items()},
        [tuple(stage.choices) for stage in stages],
        machine,
    ).stages


def find_devices(options: Options, partition: Partition, machine: Machine) -> Placed:
    """Places the modules of stages within memory: depth first, the heaviest module first.

    A module gets the first of its options with which this succeeds within ``MAX_NODES`` device sets.
    """
    count, room_bytes = machine.num_devices, machine.num_devices * machine.memory_bytes
    number_of = {name: number for number, names in enumerate(partition) for name in names}
    order = sorted(number_of, key=lambda name: -min(option.memory_bytes for option in options[name]))
    least = [min(map(_total_bytes, options[name])) for name in order]
    if sum(least) > room_bytes:
        return Placed(stages=None, is_closed=True, effort=PLACING_EFFORT)
    resident, (works_of, slots_of) = [0] * count, ([[0] * count for _ in partition] for _ in range(2))
    choices: dict[str, Choice] = {}
    num_nodes = 0

    def place(index: int) -> bool:
        """Places the modules from ``index`` on; returns False if that fails or the nodes are used up."""
        nonlocal num_nodes
        if index == len(order):
            return True
        name = order[index]
        works, slots = works_of[number_of[name]], slots_of[number_of[name]]
        peaks = list(map(max, zip(*works_of, strict=True)))
        if sum(resident) + sum(peaks) + sum(least[index:]) > room_bytes:
            return False
        columns = (resident, peaks, slots, *slots_of, *works_of)
        states = [(own + peak, *others) for own, peak, *others in zip(*columns, strict=True)]
        for option in options[name]:
            room = [
                device
                for device in sorted(range(count), key=states.__getitem__)
                if slots[device] + option.quota <= machine.num_slots
                and resident[device] + option.kept_bytes + max(peaks[device], works[device] + option.working_bytes)
                <= machine.memory_bytes
            ]
            for devices in _distinct([(states[device], device) for device in room], option.degree):
                num_nodes += 1
                if num_nodes > MAX_NODES:
                    return False
                choices[name] = option, tuple(sorted(devices))
                for sign in (1, -1):
                    for device in devices:
                        resident[device] += sign * option.kept_bytes
                        works[device] += sign * option.working_bytes
                        slots[device] += sign * option.quota
                    if sign == 1 and place(index + 1):
                        return True
        return False

    stages = None
    if place(0):
        stages = tuple(_stage_of({name: choices[name] for name in names}) for names in partition)
    effort = PLACING_EFFORT + NODE_EFFORT * min(MAX_NODES, num_nodes)
    return Placed(stages=stages, is_closed=num_nodes <= MAX_NODES, effort=effort)


def _distinct(devices: Sequence[tuple[Any, int]], count: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Yields sets of ``count`` devices by rising state; devices with equal states are taken in order."""
    if count == 0:
        yield ()
        return
    for at in range(first, len(devices) - count + 1):
        if at == first or devices[at][0] != devices[at - 1][0]:
            for others in _distinct(devices, count - 1, at + 1):
                yield devices[at][1], *others


def place_in_turn(names: Sequence[str], options: Options, machine: Machine) -> Stages:
    """Places every module in a stage of its own, within memory.

    Modules in stages of their own hold the least memory: if this is infeasible, no plan exists.

    Raises:
        InfeasibleError: It is proven that no plan fits.
        UndecidedError: No plan was found, and it is not proven that none exists.
    """
    alone, partition = _fastest_by_degree(options), [(name,) for name in names]
    lightest = {name: (min(own, key=lambda o: (_total_bytes(o), o.memory_bytes)),) for name, own in alone.items()}
    light = find_devices(lightest, partition, machine).stages
    most_ns = None if light is None else sum(stage.latency_ns for stage in light) - 1
    effort = IN_TURN_EFFORT / (5 if light else 1)
    answer = solve_stages(alone, partition, machine, most_ns=most_ns, effort=effort)
    stages = answer.stages or light
    if stages is None:
        raise _refusal(alone, machine, is_proven=answer.is_closed)
    return stages


def _fastest_by_degree(options: Options) -> Options:
    return {
        name: tuple({o.degree: o for o in sorted(own, key=lambda o: (-o.latency_ns, -o.area))}.values())[::-1]
        for name, own in options.items()
    }


def _refusal(options: Options, machine: Machine, *, is_proven: bool) -> InfeasibleError | UndecidedError:
    total = machine.num_devices * machine.memory_bytes
    least = sum(min(map(_total_bytes, own)) for own in options.values())
    reason = (
        f"the {len(options)} modules hold parameters, gradients, optimizer state and activations across stages, "
        f"at least {least:,} bytes; {machine.num_devices} devices of {machine.memory_bytes:,} bytes have {total:,}"
    )
    if least <= total:
        reason += ", and no choice of degrees and devices leaves enough for a module's workspace"
    reason += ": use a smaller batch, more devices, a sharded optimizer or activation checkpointing"
    if is_proven:
        return InfeasibleError("no plan fits into the devices' memory", reasons=[reason])
    return UndecidedError(
        f"no plan was found that fits into devices of {machine.memory_bytes:,} bytes, and it is not proven that "
        f"none exists ({reason}); hold_memory=False checks the memory of each stage alone"
    )


def search_within_memory(
    graph: ModuleGraph,
    options: Options,
    *,
    cost: Cost,
    machine: Machine,
    limits: SearchLimits | None = None,
    forbidden: Sequence[Collection[str]] = (),
    starts: Iterable[Stages] = (),
) -> ExactResult:
    """Finds a good plan within memory, and proves it optimal if ``limits`` allow.

    Arguments are those of ``search_exactly``; ``starts`` are plans that fit.

    Raises:
        ValueError: As ``search_exactly``.
        InfeasibleError: No plan avoids the forbidden stages.
        UndecidedError: No plan was found, and it is not proven that none exists.
    """
    sets = tuple(frozenset(members) for members in forbidden)
    return _HeldSearch(graph, options, cost, machine, sets, Countdown(limits or SearchLimits())).run(starts)


@dataclass
class _HeldSearch:
    graph: ModuleGraph
    options: Options
    cost: Cost
    machine: Machine
    forbidden: Forbidden
    countdown: Countdown
    best: Stages = ()
    best_ms: float = math.inf

    def __post_init__(self) -> None:
        self._times = PlacedTimes(self.cost)
        self.close_ms = 2 * len(self.graph.modules) * _ROUNDED_MS

    def run(self, starts: Iterable[Stages]) -> ExactResult:
        self.options = _prune(self.options, self.machine) or self.options
        relaxed = self.relax(self.options, self.countdown.part(RELAXED_SHARE))
        bound_ms = relaxed.record.bound_ms
        if not self.offer(self.placed(relaxed)) or self.best_ms > relaxed.cost_ms + self.close_ms:
            for stages in starts:
                self.offer(stages)
            self.offer(self.slowed(relaxed))
            self.climb()
            bound_ms = max(bound_ms, self.branch(bound_ms))
        if not self.best:
            raise UndecidedError("no plan was found that avoids the forbidden stages and fits into memory")
        bound_ms = min(bound_ms, self.best_ms)
        return ExactResult(
            stages=self.best,
            cost_ms=self.best_ms,
            record=SearchRecord(
                method="exact",
                status="optimal" if bound_ms >= self.best_ms - self.close_ms else "feasible",
                bound_ms=bound_ms,
            ),
        )

    def climb(self) -> None:
        """Changes the degrees of one or two modules of the best plan while that improves it."""
        countdown = Countdown(self.countdown.part(CLIMB_SHARE))
        visited: set[tuple[int, ...]] = set()
        is_better = bool(self.best)
        while is_better:
            is_better = False
            degree_of = {name: option.degree for stage in self.best for name, (option, _) in stage.choices.items()}
            moves = [{name: d} for name in degree_of for d in _degrees(self.options[name]) if d != degree_of[name]]
            pairs = [first | second for first, second in itertools.combinations(moves, 2) if not first.keys() & second]
            for move in ({}, *moves, *pairs):
                degrees = degree_of | move
                key = tuple(degrees[name] for name in self.graph.names)
                options = {name: tuple(o for o in self.options[name] if o.degree == degrees[name]) for name in degrees}
                if key in visited or _prune(options, self.machine) is None:
                    continue
                visited.add(key)
                if countdown.left <= 0:
                    return
                relaxed = self.relax(options, self.countdown.part(PART_SHARE))
                if relaxed.cost_ms < self.best_ms - self.close_ms and self.offer(self.slowed(relaxed)):
                    is_better = True
                    break

    def branch(self, bound_ms: float) -> float:
        """Branches until no part is below the best plan or the effort is spent; returns the bound.

        A part is relaxed like the whole, and branches on the degree of the module that holds most. If every module has
        one degree, CP-SAT solves the relaxed plan's stages, and each further part forbids one of them.
        """
        numbers = itertools.count()
        parts: list[tuple[float, int, Options, Forbidden]] = [(bound_ms, next(numbers), self.options, self.forbidden)]
        unsettled_ms = math.inf
        while parts and parts[0][0] < self.best_ms - self.close_ms and self.countdown.left > 0:
            below_ms, _, options, forbidden = heapq.heappop(parts)
            try:
                relaxed = self.relax(options, self.countdown.part(), forbidden)
            except InfeasibleError:
                continue
            below_ms = max(below_ms, relaxed.record.bound_ms)
            placed = self.placed(relaxed) if relaxed.cost_ms < self.best_ms - self.close_ms else None
            is_best = self.offer(placed) and relaxed.record.status == "optimal"
            if placed is None:
                self.offer(self.slowed(relaxed))
            if below_ms >= self.best_ms - self.close_ms or (
                is_best and self.best_ms <= relaxed.cost_ms + self.close_ms
            ):
                continue
            divided = _divide(options, relaxed)
            if divided is None:
                answer = self.solve(relaxed, options)
                self.offer(answer.stages)
                if not (answer.is_closed and self.cost.interference.is_zero):
                    unsettled_ms = min(unsettled_ms, below_ms)
                for stage in relaxed.stages:
                    members = (*forbidden, frozenset(stage.choices))
                    heapq.heappush(parts, (below_ms, next(numbers), options, members))
            for part in divided or ():
                pruned = _prune(part, self.machine)
                if pruned and self.has_place(pruned):
                    heapq.heappush(parts, (below_ms, next(numbers), pruned, forbidden))
        return min(parts[0][0] if parts else math.inf, unsettled_ms, self.best_ms)

    def slowed(self, relaxed: ExactResult) -> Stages | None:
        """Returns the stages and degrees of a relaxed plan, slowed down by the least factor at which they fit.

        A slower stage gives up slots: each module has the smallest quota within the factor of its stage's times.
        """

        def placed_at(factor: float) -> Stages | None:
            options = {
                name: (_least_quota(self.options[name], option, stage, factor),)
                for stage in relaxed.stages
                for name, (option, _) in stage.choices.items()
            }
            partition = [tuple(stage.choices) for stage in relaxed.stages]
            return self.counted(find_devices(options, partition, self.machine)).stages

        stages, fastest = placed_at(MAX_FACTOR), None
        if stages is None or (fastest := placed_at(1.0)) is not None:
            return fastest
        low, high = 1.0, MAX_FACTOR
        for _ in range(HALVINGS):
            middle = math.sqrt(low * high)
            faster = placed_at(middle)
            low, high = (middle, high) if faster is None else (low, middle)
            stages = faster or stages
        return stages

    def placed(self, relaxed: ExactResult) -> Stages | None:
        self.countdown.spend(PLACING_EFFORT)
        return place_stages(relaxed.stages, self.machine)

    def has_place(self, options: Options) -> bool:
        """Returns False only if devices cannot hold the modules in any stages."""
        answer = self.counted(find_devices(_fastest_by_degree(options), [(name,) for name in options], self.machine))
        return answer.stages is not None or not answer.is_closed

    def relax(self, options: Options, limits: SearchLimits, forbidden: Forbidden | None = None) -> ExactResult:
        sets = self.forbidden if forbidden is None else forbidden
        return search_exactly(self.graph, options, cost=self.cost, machine=self.machine, limits=limits, forbidden=sets)

    def solve(self, relaxed: ExactResult, options: Options) -> Placed:
        """Returns the stages of a relaxed plan at their best; None if the best plan is as good."""
        most_ns = None if self.best_ms == math.inf else round(self.best_ms * NS_PER_MS) - 1
        partition = [tuple(stage.choices) for stage in relaxed.stages]
        return self.counted(solve_stages(options, partition, self.machine, most_ns=most_ns, effort=STAGES_EFFORT))

    def counted(self, answer: Placed) -> Placed:
        self.countdown.spend(answer.effort)
        return answer

    def offer(self, stages: Stages | None) -> bool:
        """Updates the best plan; returns True if these stages improve it."""
        if stages is None or any(frozenset(stage.choices) in self.forbidden for stage in stages):
            return False
        total_ms = self._times.total_ms(stages)
        if total_ms >= self.best_ms - self.close_ms:
            return False
        self.best, self.best_ms = stages, total_ms
        return True


def _degrees(options: Sequence[DeploymentOption]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(option.degree for option in options))


def _total_bytes(option: DeploymentOption) -> int:
    """Returns the bytes that an option holds on all of its devices together."""
    return option.degree * option.kept_bytes


def _divide(options: Options, relaxed: ExactResult) -> tuple[Options, Options] | None:
    """Branches on the relaxed plan's degree of the module that holds most; None if every module has one degree."""
    choices = (item for stage in relaxed.stages for item in stage.choices.items())
    branchable = {name: option for name, (option, _) in choices if len(_degrees(options[name])) > 1}
    if not branchable:
        return None
    name, option = max(branchable.items(), key=lambda item: _total_bytes(item[1]))
    with_degree = tuple(o for o in options[name] if o.degree == option.degree)
    without_degree = tuple(o for o in options[name] if o.degree != option.degree)
    return {**options, name: with_degree}, {**options, name: without_degree}


def _prune(options: Options, machine: Machine) -> Options | None:
    """Drops options that do not fit even if every other module holds its least; None: a module has no option."""
    least = {name: min(map(_total_bytes, own)) for name, own in options.items()}
    room = machine.num_devices * machine.memory_bytes - sum(least.values())
    feasible = {
        name: tuple(option for option in own if option.degree * option.memory_bytes - least[name] <= room)
        for name, own in options.items()
    }
    return feasible if all(feasible.values()) else None


def _least_quota(
    options: Sequence[DeploymentOption], option: DeploymentOption, stage: StageResult, factor: float
) -> DeploymentOption:
    """Returns the smallest quota of the chosen degree at which a module is within ``factor`` of its stage's times."""
    forward_ns = factor * max(option.forward_ns for option, _ in stage.choices.values())
    backward_ns = factor * max(option.backward_ns for option, _ in stage.choices.values())
    enough = [
        o for o in options if o.degree == option.degree and o.forward_ns <= forward_ns and o.backward_ns <= backward_ns
    ]
    return min(enough, key=lambda o: (o.quota, o.latency_ns))


def solve_stages(
    options: Options, partition: Partition, machine: Machine, *, most_ns: int | None, effort: float
) -> Placed:
    """Chooses options and devices of stages with CP-SAT, without interference.

    ``pick[m][o]``: module m uses option o. ``keeps[m, d, g]``: it has d devices and g is one of them. The objective is
    the sum over stages of the slowest forward plus the slowest backward.

    Args:
        options: Options of each module; memory depends only on the degree.
        partition: The stages.
        machine: Devices to place on.
        most_ns: Upper limit of the objective.
        effort: Limit in CP-SAT's deterministic time.
    """
    from ortools.sat.python import cp_model  # 0.3 s to import

    model, devices = cp_model.CpModel(), range(machine.num_devices)
    if most_ns is None:
        most_ns = sum(max(option.latency_ns for option in own) for own in options.values())
    pick = {name: [model.new_bool_var("") for _ in own] for name, own in options.items()}
    by_degree = {(name, option.degree): option for name, own in options.items() for option in own}
    keeps = {(*key, device): model.new_bool_var("") for key in by_degree for device in devices}
    on = {(name, device): model.new_bool_var("") for name in options for device in devices}

    def total(name: str, value: Callable[[DeploymentOption], int]) -> Any:
        return sum(value(option) * is_picked for option, is_picked in zip(options[name], pick[name], strict=True))

    for name in options:
        model.add_exactly_one(pick[name])
    for name, degree in by_degree:
        has_degree = sum(
            is_picked for option, is_picked in zip(options[name], pick[name], strict=True) if option.degree == degree
        )
        model.add(sum(keeps[name, degree, device] for device in devices) == degree * has_degree)
    for name, device in on:
        model.add(on[name, device] == sum(keeps[name, d, device] for d in _degrees(options[name])))
    works = [model.new_int_var(0, machine.memory_bytes, "") for _ in devices]
    for device in devices:
        resident = sum(option.kept_bytes * keeps[*key, device] for key, option in by_degree.items())
        model.add(resident + works[device] <= machine.memory_bytes)
    heaviest = max(options, key=lambda name: max(option.kept_bytes for option in options[name]))
    for device in devices[1:]:  # devices are equal: this module has the first ones
        model.add_implication(on[heaviest, device], on[heaviest, device - 1])
    times = []
    for names in partition:
        quotas = {(name, device): model.new_int_var(0, machine.num_slots, "") for name in names for device in devices}
        for (name, device), slots in quotas.items():
            model.add(slots >= total(name, lambda option: option.quota)).only_enforce_if(on[name, device])
        for device in devices:
            model.add(sum(quotas[name, device] for name in names) <= machine.num_slots)  # paper Eq. 5
            working = [
                option.working_bytes * keeps[name, degree, device]
                for (name, degree), option in by_degree.items()
                if name in names
            ]
            model.add(sum(working) <= works[device])
        area = sum(total(name, lambda option: option.area) for name in names)  # implied
        model.add(area <= machine.num_devices * machine.num_slots)
        phases: list[Callable[[DeploymentOption], int]] = [lambda o: o.forward_ns, lambda o: o.backward_ns]
        for phase in phases:
            times.append(model.new_int_var(0, most_ns, ""))
            for name in names:
                model.add(times[-1] >= total(name, phase))
    model.add(sum(times) <= most_ns)
    model.minimize(sum(times))
    solver = repeatable_solver(effort)
    status = solver.solve(model)
    stages = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choices = {
            name: (
                next(o for o, is_picked in zip(own, pick[name], strict=True) if solver.boolean_value(is_picked)),
                tuple(device for device in devices if solver.boolean_value(on[name, device])),
            )
            for name, own in options.items()
        }
        stages = tuple(_stage_of({name: choices[name] for name in names}) for names in partition)
    return Placed(
        stages=stages,
        is_closed=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
        effort=solver.response_proto.deterministic_time + _VARIABLE_EFFORT * len(model.proto.variables),
    )
